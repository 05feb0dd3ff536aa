"""What the source answers to one request: status, fields, and which bytes of the image file follow.

The image file is a safetensors file that exists nowhere: a header, then the image itself as the data
section. File byte `len(header) + x` is image byte `x`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from http import HTTPStatus

from rfork.errors import LeaseRejected, RforkError, SourceBusy, SourceWeightsChanged
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.transport.base import AccessGate
from rfork.transport.http import headers as http_fields
from rfork.transport.http.headers import RangeNotSatisfiable

PATH = "/v1/image"

_STATUS_OF: Mapping[type[RforkError], HTTPStatus] = {
    LeaseRejected: HTTPStatus.FORBIDDEN,
    SourceBusy: HTTPStatus.CONFLICT,
    SourceWeightsChanged: HTTPStatus.GONE,
}


class ImageResource:
    """An image as a file to serve, and the gate in front of it."""

    def __init__(self, image: Image, header: bytes, gate: AccessGate) -> None:
        self.image = image
        self.header = header
        self.gate = gate
        self.size = len(header) + image.layout.image_bytes
        self._nonce = secrets.token_hex(8)

    @property
    def etag(self) -> str:
        """A strong entity tag: no other export, here or in a process that takes over the port, has it."""
        return f'"{self._nonce}-{self.gate.version_tag()}"'

    def admit(self, token: str, begin: int, end: int) -> str:
        """Ask the gate for file range `[begin, end)`: whose lease it is. For the header it needs no more."""
        data = len(self.header)
        return self.gate.authorize(token, max(0, begin - data), max(0, end - data))

    def reading(self, token: str, begin: int, end: int, cut: Callable[[], None]) -> AbstractContextManager[None]:
        """`Gate.reading` of file range `[begin, end)`."""
        data = len(self.header)
        return self.gate.read_guard(token, max(0, begin - data), max(0, end - data), cut)


@dataclass(frozen=True, slots=True)
class ImageResponse:
    """A status, its fields, and the body: `text`, or file range `[begin, end)` when that is not empty.

    `fork_id`: whose token the gate knew, whatever came of the request; None when it knew none.
    """

    status: HTTPStatus
    fields: tuple[tuple[str, str], ...] = ()
    text: bytes = b""
    begin: int = 0
    end: int = 0
    fork_id: str | None = None

    def head(self, *, alive: bool) -> bytes:
        """The bytes in front of the body."""
        length = self.end - self.begin if self.end > self.begin else len(self.text)
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            *(f"{name}: {value}" for name, value in self.fields),
            f"Content-Length: {length}",
        ]
        if not alive:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def error_response(status: HTTPStatus, reason: str, *fields: tuple[str, str]) -> ImageResponse:
    """An answer that gives no byte of the image: one line that says why."""
    line = " ".join(reason.split()) + "\n"
    content_type = ("Content-Type", "text/plain; charset=utf-8")
    return ImageResponse(status, (content_type, *fields), line.encode())


def respond(method: str, target: str, fields: Mapping[str, str], file: ImageResource) -> ImageResponse:
    """Decide on one request; for a GET the gate has admitted all that the answer's body will hold."""
    if target.partition("?")[0] != PATH:
        return error_response(HTTPStatus.NOT_FOUND, f"there is only {PATH} here")
    if method not in ("GET", "HEAD"):
        return error_response(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not for images", ("Allow", "GET, HEAD"))
    token = http_fields.bearer_token(fields)
    if token is None:
        challenge = ("WWW-Authenticate", 'Bearer realm="rfork"')
        return error_response(HTTPStatus.UNAUTHORIZED, "show a lease: Authorization: Bearer TOKEN", challenge)
    try:
        fork_id = file.admit(token, 0, 0)
    except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
        return error_response(_STATUS_OF[type(error)], str(error))
    try:
        decided = _file_response(method, token, fields, file)
    except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
        decided = error_response(_STATUS_OF[type(error)], str(error))
    return replace(decided, fork_id=fork_id)


def _file_response(method: str, token: str, fields: Mapping[str, str], file: ImageResource) -> ImageResponse:
    etag = file.etag
    if "if-match" in fields and not http_fields.etag_matches(fields["if-match"], etag):
        return error_response(HTTPStatus.PRECONDITION_FAILED, "the weights are others by now", ("ETag", etag))
    about = (
        ("Content-Type", "application/octet-stream"),
        ("Accept-Ranges", "bytes"),
        ("ETag", etag),
    )
    wanted: Range | None = None
    # A Range is for GET alone, and only if the client's part is of this very file (RFC 9110 13.1.5, 14.2).
    if method == "GET" and "range" in fields and http_fields.etag_matches(fields.get("if-range", "*"), etag):
        try:
            wanted = http_fields.parse_range(fields["range"], file.size)
        except RangeNotSatisfiable as error:
            unsatisfied_range = ("Content-Range", f"bytes */{file.size}")
            return error_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, str(error), unsatisfied_range)
    begin, end = wanted or (0, file.size)
    if method == "GET":
        file.admit(token, begin, end)
    if wanted is None:
        return ImageResponse(HTTPStatus.OK, about, begin=begin, end=end)
    content_range = ("Content-Range", f"bytes {begin}-{end - 1}/{file.size}")
    return ImageResponse(HTTPStatus.PARTIAL_CONTENT, (*about, content_range), begin=begin, end=end)
