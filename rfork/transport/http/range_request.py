"""One Range request and its response over a connected stream. Runs on the target.

Nothing waits longer than the deadline, or than the idle timeout for the next byte.
"""

from __future__ import annotations

import errno
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from rfork.errors import (
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceUnreachable,
    SourceWeightsChanged,
    TargetError,
)
from rfork.net.http_heads import MalformedHead, ResponseHead, parse_response
from rfork.net.stream import PlainStream, ScatterCursor, Stream, TlsStream
from rfork.transport.base import CONNECT_TIMEOUT_S

MAX_HEAD_BYTES = 64 << 10
MAX_ERROR_BODY = 4096
"""Maximum bytes of an error response's text that are read for the error message."""

_MEANING: Mapping[int, type[RforkError]] = {
    401: LeaseRejected,
    403: LeaseRejected,
    409: SourceBusy,
    429: SourceBusy,
    503: SourceBusy,
    410: SourceWeightsChanged,
    412: SourceWeightsChanged,
}

_VISIBLE = re.compile(r"[\x21-\x7e]*")


@dataclass(frozen=True, slots=True)
class HttpLocation:
    """Location of a file: server address and request target."""

    host: str
    port: int
    secure: bool
    authority: str
    request_target: str

    @classmethod
    def parse(cls, url: str) -> HttpLocation:
        """Parse an absolute http or https URL. Raises SourceCorrupt for any other."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise SourceCorrupt(f"invalid URL {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceCorrupt(f"invalid URL {url!r}: not http or https")
        secure = parts.scheme == "https"
        request_target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not _VISIBLE.fullmatch(request_target + parts.netloc):
            raise SourceCorrupt(f"invalid URL {url!r}: special characters must be quoted")
        authority = parts.netloc.rpartition("@")[2]
        return cls(parts.hostname, port or (443 if secure else 80), secure, authority, request_target)

    def __str__(self) -> str:
        return self.authority


class IdleTimeout:
    """Remaining time to wait for a source: `idle_timeout_s` seconds since its last byte, limited by the
    deadline.
    """

    def __init__(
        self,
        location: HttpLocation,
        idle_timeout_s: float,
        deadline: float,
        on_body: Callable[[], None] | None = None,
    ) -> None:
        """`on_body` is called when bytes of the response body arrive."""
        self.location = location
        self._on_body = on_body
        self._idle_timeout_s = idle_timeout_s
        self._deadline = deadline
        self._last = time.monotonic()

    def left(self) -> float:
        """Return the maximum seconds of the next step. Raises SourceTimeout if no time is left."""
        now = time.monotonic()
        if now >= self._deadline:
            raise SourceTimeout(f"{self.location} was too slow: the read's deadline has passed")
        if now - self._last >= self._idle_timeout_s:
            raise SourceTimeout(f"{self.location} sent nothing for {self._idle_timeout_s:g} s")
        # A receive that times out with some bytes does not report when they arrived, so check often.
        return min(self._idle_timeout_s / 4, self._deadline - now)

    def renew(self, *, body: bool = False) -> None:
        """Record that bytes arrived; `body`: of the response body."""
        self._last = time.monotonic()
        if body and self._on_body is not None:
            self._on_body()


def open_stream(
    location: HttpLocation, context: ssl.SSLContext | None, idle_timeout_s: float, deadline: float
) -> Stream:
    """Connect. Raises SourceUnavailable, SourceTimeout or SourceUnreachable."""
    seconds = min(idle_timeout_s, CONNECT_TIMEOUT_S, deadline - time.monotonic())
    if seconds <= 0:
        raise SourceTimeout(f"{location} was too slow: the read's deadline has passed")
    try:
        connected = socket.create_connection((location.host, location.port), timeout=seconds)
        if context is None:
            return PlainStream(connected)
        stream = TlsStream(context.wrap_socket(connected, server_hostname=location.host, do_handshake_on_connect=False))
        try:
            stream.handshake(seconds)
        except OSError:
            stream.close()
            raise
        return stream
    except TimeoutError:
        raise SourceUnreachable(f"no connection to {location} within {seconds:.1f} s") from None
    except OSError as error:
        raise SourceUnavailable(f"cannot connect to {location}: {error}") from error


def send_range_request(
    stream: Stream, begin: int, end: int, token: str, etag: str, idle_timeout: IdleTimeout
) -> tuple[ResponseHead, bytes]:
    """Request file range `[begin, end)`; return the response head and any bytes of the body received with it.

    Raises SourceTimeout, SourceCorrupt for a response that is not HTTP, or OSError if the connection is lost.
    """
    lines = [
        f"GET {idle_timeout.location.request_target} HTTP/1.1",
        f"Host: {idle_timeout.location.authority}",
        f"Range: bytes={begin}-{end - 1}",
        "Accept-Encoding: identity",
    ]
    if token:
        if not _VISIBLE.fullmatch(token):
            raise LeaseRejected("a lease token must not contain spaces or control characters")
        lines.append(f"Authorization: Bearer {token}")
    # Weak tags never match (RFC 9110 13.1.1).
    if etag and not etag.startswith("W/") and _VISIBLE.fullmatch(etag):
        lines.append(f"If-Match: {etag}")
    try:
        stream.send(["\r\n".join([*lines, "", ""]).encode("ascii")], idle_timeout.left())
    except TimeoutError:
        raise SourceTimeout(f"{idle_timeout.location} does not accept requests") from None
    received = b""
    try:
        while (parsed := parse_response(received, MAX_HEAD_BYTES)) is None:
            data = _receive(stream, 4096, idle_timeout)
            if not data:
                raise ConnectionResetError("connection closed before a response")
            received += data
    except MalformedHead as error:
        raise SourceCorrupt(f"{idle_timeout.location} sent an invalid HTTP response: {error}") from None
    return parsed


def read_body_into(stream: Stream, cursor: ScatterCursor, count: int, idle_timeout: IdleTimeout) -> None:
    """Receive `count` bytes into the cursor.

    Raises SourceTimeout, TargetError for read-only memory, or OSError if the connection is lost.
    """
    while count:
        try:
            received = stream.receive_into(cursor, count, idle_timeout.left())
        except TimeoutError:
            continue
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise TargetError("the target's memory is not writable") from error
            raise
        if received == 0:
            raise ConnectionResetError(f"connection closed with {count} bytes missing")
        idle_timeout.renew(body=True)
        count -= received


def error_from_response(stream: Stream, response: ResponseHead, body: bytes, idle_timeout: IdleTimeout) -> RforkError:
    """Return the error for a response other than 206, with the server's reason if it is plain text."""
    location, status = idle_timeout.location, response.status
    if status == 200:
        return SourceCorrupt(f"{location} does not support range requests: it would send the complete file")
    fields = response.fields
    length = fields.get("content-length", "")
    if fields.get("content-type", "").startswith("text/plain") and length.isdecimal() and len(length) < 10:
        max_body_bytes = min(int(length), MAX_ERROR_BODY)
        while len(body) < max_body_bytes and (data := _receive(stream, max_body_bytes - len(body), idle_timeout)):
            body += data
    reason = " ".join(body[:MAX_ERROR_BODY].decode("utf-8", "replace").split()) if length else ""
    error_type = _MEANING.get(status, SourceUnavailable if status >= 500 else SourceCorrupt)
    return error_type(f"{location} responded {status}: {reason or 'no reason stated'}")


def _receive(stream: Stream, max_bytes: int, idle_timeout: IdleTimeout) -> bytes:
    while True:
        try:
            data = stream.receive(max_bytes, idle_timeout.left())
        except TimeoutError:
            continue
        idle_timeout.renew()
        return data
