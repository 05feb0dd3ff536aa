"""Decides the response to one request: status, header fields and byte range.

There are two resources: the image, and a virtual safetensors file whose data section is the image. File byte
`len(header) + x` is image byte `x`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from http import HTTPStatus

from rfork.errors import LeaseRejected, RforkError, SourceBusy, SourceWeightsChanged
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.net import http_heads as http_fields
from rfork.net.http_heads import RangeNotSatisfiable
from rfork.transport.base import AccessGate

PATH = "/v1/image"
FILE_PATH = f"{PATH}.safetensors"

_STATUS_OF: Mapping[type[RforkError], HTTPStatus] = {
    LeaseRejected: HTTPStatus.FORBIDDEN,
    SourceBusy: HTTPStatus.CONFLICT,
    SourceWeightsChanged: HTTPStatus.GONE,
}


class ImageResource:
    """An image and its access gate. `header` returns the header of the safetensors file, called once if it is read."""

    def __init__(self, image: Image, header: Callable[[], bytes], gate: AccessGate) -> None:
        self.image = image
        self.gate = gate
        self._make_header = header
        self._nonce = secrets.token_hex(8)

    @cached_property
    def header(self) -> bytes:
        """Header of the safetensors file."""
        return self._make_header()

    @property
    def etag(self) -> str:
        """Strong entity tag, unique to this export, even if another process reuses the port."""
        return f'"{self._nonce}-{self.gate.version_tag()}"'


@dataclass(frozen=True, slots=True)
class ImageResponse:
    """A status, its fields and a body: `text`, or byte range `[begin, end)` of `header` and image if that is not empty.

    `fork_id`: the fork of a valid token, even if the request fails; None without one.
    """

    status: HTTPStatus
    fields: tuple[tuple[str, str], ...] = ()
    text: bytes = b""
    begin: int = 0
    end: int = 0
    header: bytes = b""
    fork_id: str | None = None

    def image_range(self, begin: int, end: int) -> Range:
        """Return the part of byte range `[begin, end)` that lies in the image; of the header alone, an empty one."""
        header_bytes = len(self.header)
        return max(0, begin - header_bytes), max(0, end - header_bytes)

    def head(self, *, alive: bool) -> bytes:
        """Return the bytes before the body."""
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
    """Return a response without image bytes: one line with the reason."""
    line = " ".join(reason.split()) + "\n"
    content_type = ("Content-Type", "text/plain; charset=utf-8")
    return ImageResponse(status, (content_type, *fields), line.encode())


def respond(method: str, request_target: str, fields: Mapping[str, str], resource: ImageResource) -> ImageResponse:
    """Decide the response to one request; the body of a GET has been authorized by the gate.

    The header of the safetensors file needs only a valid lease.
    """
    path = request_target.partition("?")[0]
    if path not in (PATH, FILE_PATH):
        return error_response(HTTPStatus.NOT_FOUND, f"not found; the resources are {PATH} and {FILE_PATH}")
    if method not in ("GET", "HEAD"):
        return error_response(
            HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not allowed for images", ("Allow", "GET, HEAD")
        )
    token = http_fields.bearer_token(fields)
    if token is None:
        challenge = ("WWW-Authenticate", 'Bearer realm="rfork"')
        return error_response(HTTPStatus.UNAUTHORIZED, "a lease is required: Authorization: Bearer TOKEN", challenge)
    try:
        fork_id = resource.gate.authorize(token, 0, 0)
    except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
        return error_response(_STATUS_OF[type(error)], str(error))
    try:
        header = resource.header if path == FILE_PATH else b""
        response = _range_response(method, token, fields, resource, header)
    except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
        response = error_response(_STATUS_OF[type(error)], str(error))
    return replace(response, fork_id=fork_id)


def _range_response(
    method: str, token: str, fields: Mapping[str, str], resource: ImageResource, header: bytes
) -> ImageResponse:
    etag, size = resource.etag, len(header) + resource.image.layout.image_bytes
    if "if-match" in fields and not http_fields.etag_matches(fields["if-match"], etag):
        return error_response(HTTPStatus.PRECONDITION_FAILED, "the weights have changed", ("ETag", etag))
    common_fields = (
        ("Content-Type", "application/octet-stream"),
        ("Accept-Ranges", "bytes"),
        ("ETag", etag),
    )
    requested: Range | None = None
    # Range applies only to GET, and only if the client's part is of this file (RFC 9110 13.1.5, 14.2).
    if method == "GET" and "range" in fields and http_fields.etag_matches(fields.get("if-range", "*"), etag):
        try:
            requested = http_fields.parse_range(fields["range"], size)
        except RangeNotSatisfiable as error:
            unsatisfied_range = ("Content-Range", f"bytes */{size}")
            return error_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, str(error), unsatisfied_range)
    begin, end = requested or (0, size)
    response = ImageResponse(HTTPStatus.OK, common_fields, begin=begin, end=end, header=header)
    if method == "GET":
        resource.gate.authorize(token, *response.image_range(begin, end))
    if requested is None:
        return response
    content_range = ("Content-Range", f"bytes {begin}-{end - 1}/{size}")
    return replace(response, status=HTTPStatus.PARTIAL_CONTENT, fields=(*common_fields, content_range))
