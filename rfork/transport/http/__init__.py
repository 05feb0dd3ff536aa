"""The http transport: HTTP/1.1 Range requests on a live image, under a lease token, TLS by setting.

The default where there is no RDMA. What a seed serves is a safetensors file, so any HTTP client can
read it, and what reads it here reads any file behind HTTP.
"""

from __future__ import annotations

from rfork.errors import SettingsError, SourceCorrupt
from rfork.image.memory import Image
from rfork.image.safetensors_header import live_header
from rfork.settings import Settings
from rfork.tls_files import client_context, server_context
from rfork.transport.base import Availability, Endpoint, Gate, Talk, TokenSource, silent
from rfork.transport.http.answer import ImageFile
from rfork.transport.http.client import HttpReader
from rfork.transport.http.exchange import Place
from rfork.transport.http.server import HttpExporter


class HttpTransport:
    """`Transport` over HTTP/1.1.

    Endpoint parameters: `url`; `data_offset`, the file offset of the image (default 0); `etag`, the
    strong entity tag that every answer must have (default: that of the first answer).
    """

    def __init__(self, settings: Settings) -> None:
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

    def export(self, image: Image, gate: Gate) -> HttpExporter:
        """Source side: serve `image` until the exporter is closed. Raises PortInUse or SettingsError."""
        settings = self._settings
        return HttpExporter(
            ImageFile(image, live_header(image.layout), gate),
            bind=settings.bind,
            ports=settings.ports_from(settings.http_port),
            advertise=settings.reachable_at,
            tls=server_context(settings.tls),
            stall_s=settings.stall_s,
            nice=settings.giving_nice,
        )

    def connect(
        self, endpoint: Endpoint, image: Image, token: TokenSource, deadline: float, talk: Talk = silent
    ) -> HttpReader:
        """Target side: connect to the endpoint's URL; a token of "" is not sent. Raises as `read` does."""
        parameters = endpoint.parameters
        place = Place.of(parameters.get("url", ""))
        offset = parameters.get("data_offset", "0")
        if not offset.isdecimal():
            raise SourceCorrupt(f"{place} says its image begins at {offset!r}, which is no byte offset")
        reader = HttpReader(
            place,
            image,
            token,
            data_offset=int(offset),
            etag=parameters.get("etag", ""),
            context=client_context(self._settings.tls) if place.secure else None,
            stall_s=self._settings.stall_s,
        )
        reader.open(deadline)
        return reader
