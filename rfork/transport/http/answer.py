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

from rfork.errors import LeaseRefused, RforkError, SourceBusy, SourceChanged
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.transport.base import Gate
from rfork.transport.http import fields as http_fields
from rfork.transport.http.fields import RangeNotSatisfiable

PATH = "/v1/image"

_STATUS_OF: Mapping[type[RforkError], HTTPStatus] = {
    LeaseRefused: HTTPStatus.FORBIDDEN,
    SourceBusy: HTTPStatus.CONFLICT,
    SourceChanged: HTTPStatus.GONE,
}


class ImageFile:
    """An image as a file to serve, and the gate in front of it."""

    def __init__(self, image: Image, header: bytes, gate: Gate) -> None:
        self.image = image
        self.header = header
        self.gate = gate
        self.size = len(header) + image.layout.image_bytes
        self._nonce = secrets.token_hex(8)

    @property
    def etag(self) -> str:
        """A strong entity tag: no other export, here or in a process that takes over the port, has it."""
        return f'"{self._nonce}-{self.gate.etag()}"'

    def admit(self, token: str, begin: int, end: int) -> str:
        """Ask the gate for file range `[begin, end)`: whose lease it is. For the header it needs no more."""
        data = len(self.header)
        return self.gate.admit(token, max(0, begin - data), max(0, end - data))

    def reading(
        self, token: str, begin: int, end: int, cut: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """`Gate.reading` of file range `[begin, end)`."""
        data = len(self.header)
        return self.gate.reading(token, max(0, begin - data), max(0, end - data), cut)


@dataclass(frozen=True, slots=True)
class Answer:
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


def refusal(status: HTTPStatus, reason: str, *fields: tuple[str, str]) -> Answer:
    """An answer that gives no byte of the image: one line that says why."""
    line = " ".join(reason.split()) + "\n"
    kind = ("Content-Type", "text/plain; charset=utf-8")
    return Answer(status, (kind, *fields), line.encode())


def answer(method: str, target: str, fields: Mapping[str, str], file: ImageFile) -> Answer:
    """Decide on one request; for a GET the gate has admitted all that the answer's body will hold."""
    if target.partition("?")[0] != PATH:
        return refusal(HTTPStatus.NOT_FOUND, f"there is only {PATH} here")
    if method not in ("GET", "HEAD"):
        return refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not for images", ("Allow", "GET, HEAD"))
    token = http_fields.bearer(fields)
    if token is None:
        challenge = ("WWW-Authenticate", 'Bearer realm="rfork"')
        return refusal(HTTPStatus.UNAUTHORIZED, "show a lease: Authorization: Bearer TOKEN", challenge)
    try:
        fork_id = file.admit(token, 0, 0)
    except (LeaseRefused, SourceBusy, SourceChanged) as error:
        return refusal(_STATUS_OF[type(error)], str(error))
    try:
        decided = _file_answer(method, token, fields, file)
    except (LeaseRefused, SourceBusy, SourceChanged) as error:
        decided = refusal(_STATUS_OF[type(error)], str(error))
    return replace(decided, fork_id=fork_id)


def _file_answer(method: str, token: str, fields: Mapping[str, str], file: ImageFile) -> Answer:
    etag = file.etag
    if "if-match" in fields and not http_fields.names_tag(fields["if-match"], etag):
        return refusal(HTTPStatus.PRECONDITION_FAILED, "the weights are others by now", ("ETag", etag))
    about = (
        ("Content-Type", "application/octet-stream"),
        ("Accept-Ranges", "bytes"),
        ("ETag", etag),
    )
    wanted: Range | None = None
    # A Range is for GET alone, and only if the client's part is of this very file (RFC 9110 13.1.5, 14.2).
    if method == "GET" and "range" in fields and http_fields.names_tag(fields.get("if-range", "*"), etag):
        try:
            wanted = http_fields.requested_range(fields["range"], file.size)
        except RangeNotSatisfiable as error:
            whole = ("Content-Range", f"bytes */{file.size}")
            return refusal(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, str(error), whole)
    begin, end = wanted or (0, file.size)
    if method == "GET":
        file.admit(token, begin, end)
    if wanted is None:
        return Answer(HTTPStatus.OK, about, begin=begin, end=end)
    place = ("Content-Range", f"bytes {begin}-{end - 1}/{file.size}")
    return Answer(HTTPStatus.PARTIAL_CONTENT, (*about, place), begin=begin, end=end)
