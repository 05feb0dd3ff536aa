"""The http transport: HTTP/1.1 Range requests on a live image, authorized by a lease token, optionally over
TLS.

Default for machines without RDMA. A seed also serves the image as a safetensors file, which any HTTP client can save.
"""

from __future__ import annotations

from functools import cache, partial

from rfork.errors import SettingsError
from rfork.image.memory import Image
from rfork.image.safetensors_header import live_header
from rfork.net.tls import client_context, server_context
from rfork.settings import InstanceSettings
from rfork.thread_priority import SERVING_THREAD_NICE
from rfork.transport.base import (
    AccessGate,
    Availability,
    Endpoint,
    OpenControlStream,
    TokenSource,
    no_control_stream,
)
from rfork.transport.http.client import HttpReader
from rfork.transport.http.responses import ImageResource
from rfork.transport.http.server import HttpExporter


class HttpTransport:
    """`Transport` over HTTP/1.1.

    Endpoint parameters: `url`; `etag`, the strong entity tag that every response must have (default: that of the
    first response).
    """

    connect_timeout_s = 0.0

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings

    @property
    def name(self) -> str:
        """Name in settings, plans and reports."""
        return "http"

    @property
    def one_sided(self) -> bool:
        """False: the source sends each byte."""
        return False

    def availability(self) -> Availability:
        """Available unless the TLS files cannot be read."""
        tls = self._settings.tls
        try:
            serves_tls = server_context(tls) is not None
            if tls.enabled:  # otherwise there is nothing to check, and loading the system's CA certificates is slow
                client_context(tls)
        except SettingsError as error:
            return Availability(False, str(error), "correct or unset RFORK_TLS_*")
        return Availability(True, f"needs only TCP; serves {'https' if serves_tls else 'http'}")

    def export(self, image: Image, gate: AccessGate) -> HttpExporter:
        """Source side: serve `image` until the exporter is closed. Raises PortInUse or SettingsError."""
        settings = self._settings
        return HttpExporter(
            ImageResource(image, partial(live_header, image.layout), gate),
            bind=settings.bind,
            ports=settings.ports_from(settings.http_port),
            advertise=settings.advertised_host,
            tls=server_context(settings.tls),
            idle_timeout_s=settings.source_idle_timeout_s,
            nice=SERVING_THREAD_NICE,
        )

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        open_control_stream: OpenControlStream = no_control_stream,
    ) -> HttpReader:
        """Target side: connect to the endpoint's URL; an empty token is not sent. Raises as `Reader.read`."""
        parameters = endpoint.parameters
        reader = HttpReader(
            parameters.get("url", ""),
            image,
            token,
            etag=parameters.get("etag", ""),
            tls_context=cache(lambda: client_context(self._settings.tls)),
            idle_timeout_s=self._settings.source_idle_timeout_s,
        )
        reader.open(deadline)
        return reader
