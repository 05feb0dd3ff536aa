"""The http transport: HTTP/1.1 Range requests on a live image, under a lease token, TLS by setting.

The default where there is no RDMA. What a seed serves is a safetensors file, so any HTTP client can
read it, and what reads it here reads any file behind HTTP.
"""

from __future__ import annotations

from rfork.errors import SettingsError, SourceCorrupt
from rfork.image.memory import Image
from rfork.image.safetensors_header import live_header
from rfork.settings import InstanceSettings
from rfork.tls_files import client_context, server_context
from rfork.transport.base import (
    AccessGate,
    Availability,
    Endpoint,
    OpenControlStream,
    TokenSource,
    no_control_stream,
)
from rfork.transport.http.client import HttpReader
from rfork.transport.http.range_request import HttpTarget
from rfork.transport.http.responses import ImageResource
from rfork.transport.http.server import HttpExporter


class HttpTransport:
    """`Transport` over HTTP/1.1.

    Endpoint parameters: `url`; `data_offset`, the file offset of the image (default 0); `etag`, the
    strong entity tag that every answer must have (default: that of the first answer).
    """

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings

    @property
    def name(self) -> str:
        """The word used for it in settings, plans and reports."""
        return "http"

    @property
    def one_sided(self) -> bool:
        """The source sends each byte itself."""
        return False

    def availability(self) -> Availability:
        """Usable wherever there is TCP; not with TLS files that cannot be read."""
        tls = self._settings.tls
        try:
            serves = server_context(tls) is not None
            if tls.enabled:  # or there is nothing to try, and all authorities of this machine would be read
                client_context(tls)
        except SettingsError as error:
            return Availability(False, str(error), "mend or unset RFORK_TLS_*")
        return Availability(True, f"needs nothing but TCP; serves {'https' if serves else 'http'}")

    def export(self, image: Image, gate: AccessGate) -> HttpExporter:
        """Source side: serve `image` until the exporter is closed. Raises PortInUse or SettingsError."""
        settings = self._settings
        return HttpExporter(
            ImageResource(image, live_header(image.layout), gate),
            bind=settings.bind,
            ports=settings.ports_from(settings.http_port),
            advertise=settings.advertised_host,
            tls=server_context(settings.tls),
            stall_s=settings.source_idle_timeout_s,
            nice=settings.serving_thread_nice,
        )

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> HttpReader:
        """Target side: connect to the endpoint's URL; a token of "" is not sent. Raises as `read` does."""
        parameters = endpoint.parameters
        http_target = HttpTarget.of(parameters.get("url", ""))
        offset = parameters.get("data_offset", "0")
        if not offset.isdecimal():
            raise SourceCorrupt(f"{http_target} says its image begins at {offset!r}, which is no byte offset")
        reader = HttpReader(
            http_target,
            image,
            token,
            data_offset=int(offset),
            etag=parameters.get("etag", ""),
            context=client_context(self._settings.tls) if http_target.secure else None,
            stall_s=self._settings.source_idle_timeout_s,
        )
        reader.open(deadline)
        return reader
