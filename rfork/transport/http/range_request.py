"""One request and its answer over a connected stream. Runs on the target.

Nothing here waits past a deadline, nor longer than the stall limit for the next byte.
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
from rfork.transport.base import CONNECT_S
from rfork.transport.http.parser import MalformedHead, ResponseHead, parse_response
from rfork.transport.http.stream import PlainStream, ScatterCursor, Stream, TlsStream

MAX_HEAD_BYTES = 64 << 10
MAX_ERROR_BODY = 4096
"""Bytes of a refusal's text that are read, to be passed on."""

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
class HttpTarget:
    """Where a file is: what to connect to, and what to ask for there."""

    host: str
    port: int
    secure: bool
    authority: str
    target: str

    @classmethod
    def of(cls, url: str) -> HttpTarget:
        """The place an absolute http or https URL names. Raises SourceCorrupt for another."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise SourceCorrupt(f"cannot read from {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceCorrupt(f"cannot read from {url!r}: not an http or https URL")
        secure = parts.scheme == "https"
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not _VISIBLE.fullmatch(target + parts.netloc):
            raise SourceCorrupt(f"cannot read from {url!r}: its special characters are not quoted")
        authority = parts.netloc.rpartition("@")[2]
        return cls(parts.hostname, port or (443 if secure else 80), secure, authority, target)

    def __str__(self) -> str:
        return self.authority


class IdleTimeout:
    """How much longer to wait for a source: `source_idle_timeout_s` seconds from its last byte, and to the deadline."""

    def __init__(
        self,
        http_target: HttpTarget,
        stall_s: float,
        deadline: float,
        on_body: Callable[[], None] | None = None,
    ) -> None:
        """`on_body` is called when bytes of the answer's body come."""
        self.http_target = http_target
        self._on_body = on_body
        self._stall_s = stall_s
        self._deadline = deadline
        self._last = time.monotonic()

    def left(self) -> float:
        """Seconds the next step may take. Raises SourceTimeout when there are none."""
        now = time.monotonic()
        if now >= self._deadline:
            raise SourceTimeout(f"{self.http_target} was too slow: the read's deadline has passed")
        if now - self._last >= self._stall_s:
            raise SourceTimeout(f"{self.http_target} sent nothing for {self._stall_s:g} s")
        # A fill that times out with some bytes does not tell when they came: so ask often enough.
        return min(self._stall_s / 4, self._deadline - now)

    def renew(self, *, body: bool = False) -> None:
        """Say that bytes came; `body`: of the answer's body."""
        self._last = time.monotonic()
        if body and self._on_body is not None:
            self._on_body()


def open_stream(http_target: HttpTarget, context: ssl.SSLContext | None, stall_s: float, deadline: float) -> Stream:
    """Connect. Raises SourceUnavailable, SourceTimeout or SourceUnreachable."""
    seconds = min(stall_s, CONNECT_S, deadline - time.monotonic())
    if seconds <= 0:
        raise SourceTimeout(f"{http_target} was too slow: the read's deadline has passed")
    try:
        connected = socket.create_connection((http_target.host, http_target.port), timeout=seconds)
        if context is None:
            return PlainStream(connected)
        stream = TlsStream(
            context.wrap_socket(connected, server_hostname=http_target.host, do_handshake_on_connect=False)
        )
        try:
            stream.handshake(seconds)
        except OSError:
            stream.close()
            raise
        return stream
    except TimeoutError:
        raise SourceUnreachable(f"no connection to {http_target} within {seconds:.1f} s") from None
    except OSError as error:
        raise SourceUnavailable(f"cannot connect to {http_target}: {error}") from error


def send_range_request(
    stream: Stream, begin: int, end: int, token: str, etag: str, idle_timeout: IdleTimeout
) -> tuple[ResponseHead, bytes]:
    """Ask for file range `[begin, end)`: the answer's head, and what of its body came along with it.

    Raises SourceTimeout, SourceCorrupt for what is not HTTP, or OSError when the connection drops.
    """
    lines = [
        f"GET {idle_timeout.http_target.target} HTTP/1.1",
        f"Host: {idle_timeout.http_target.authority}",
        f"Range: bytes={begin}-{end - 1}",
        "Accept-Encoding: identity",
    ]
    if token:
        if not _VISIBLE.fullmatch(token):
            raise LeaseRejected("a lease token cannot hold spaces or control characters")
        lines.append(f"Authorization: Bearer {token}")
    # Weak tags never match (RFC 9110 13.1.1).
    if etag and not etag.startswith("W/") and _VISIBLE.fullmatch(etag):
        lines.append(f"If-Match: {etag}")
    try:
        stream.send(["\r\n".join([*lines, "", ""]).encode("ascii")], idle_timeout.left())
    except TimeoutError:
        raise SourceTimeout(f"{idle_timeout.http_target} does not read our request") from None
    received = b""
    try:
        while (parsed := parse_response(received, MAX_HEAD_BYTES)) is None:
            data = _receive(stream, 4096, idle_timeout)
            if not data:
                raise ConnectionResetError("closed before it answered")
            received += data
    except MalformedHead as error:
        raise SourceCorrupt(f"{idle_timeout.http_target} does not answer in HTTP: {error}") from None
    return parsed


def read_body_into(stream: Stream, cursor: ScatterCursor, count: int, idle_timeout: IdleTimeout) -> None:
    """Receive `count` bytes into the cursor.

    Raises SourceTimeout, TargetError for read-only memory, or OSError when the connection drops.
    """
    while count:
        try:
            received = stream.receive_into(cursor, count, idle_timeout.left())
        except TimeoutError:
            continue
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise TargetError("the target's own memory cannot be written") from error
            raise
        if received == 0:
            raise ConnectionResetError(f"closed with {count} bytes to come")
        idle_timeout.renew(body=True)
        count -= received


def error_from_response(stream: Stream, response: ResponseHead, body: bytes, idle_timeout: IdleTimeout) -> RforkError:
    """What an answer other than 206 means, with the server's own words if it gave any in plain text."""
    http_target, status = idle_timeout.http_target, response.status
    if status == 200:
        return SourceCorrupt(f"{http_target} ignores Range: it would send the whole file")
    fields = response.fields
    length = fields.get("content-length", "")
    if fields.get("content-type", "").startswith("text/plain") and length.isdecimal() and len(length) < 10:
        max_body_bytes = min(int(length), MAX_ERROR_BODY)
        while len(body) < max_body_bytes and (data := _receive(stream, max_body_bytes - len(body), idle_timeout)):
            body += data
    reason = " ".join(body[:MAX_ERROR_BODY].decode("utf-8", "replace").split()) if length else ""
    error_type = _MEANING.get(status, SourceUnavailable if status >= 500 else SourceCorrupt)
    return error_type(f"{http_target} answers {status}: {reason or 'no reason given'}")


def _receive(stream: Stream, max_bytes: int, idle_timeout: IdleTimeout) -> bytes:
    while True:
        try:
            data = stream.receive(max_bytes, idle_timeout.left())
        except TimeoutError:
            continue
        idle_timeout.renew()
        return data
