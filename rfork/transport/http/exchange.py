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
    LeaseRefused,
    RforkError,
    SourceBusy,
    SourceChanged,
    SourceCorrupt,
    SourceGone,
    SourceStalled,
    SourceUnreachable,
    TargetError,
)
from rfork.transport.base import CONNECT_S
from rfork.transport.http.heads import BadHead, ResponseHead, parse_response
from rfork.transport.http.stream import Cursor, PlainStream, Stream, TlsStream

LARGEST_HEAD = 64 << 10
LARGEST_REASON = 4096
"""Bytes of a refusal's text that are read, to be passed on."""

_MEANING: Mapping[int, type[RforkError]] = {
    401: LeaseRefused,
    403: LeaseRefused,
    409: SourceBusy,
    429: SourceBusy,
    503: SourceBusy,
    410: SourceChanged,
    412: SourceChanged,
}

_VISIBLE = re.compile(r"[\x21-\x7e]*")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file is: what to connect to, and what to ask for there."""

    host: str
    port: int
    secure: bool
    authority: str
    target: str

    @classmethod
    def of(cls, url: str) -> Place:
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


class Patience:
    """How much longer to wait for a source: `stall_s` seconds from its last byte, and to the deadline."""

    def __init__(
        self, place: Place, stall_s: float, deadline: float, on_body: Callable[[], None] | None = None
    ) -> None:
        """`on_body` is called when bytes of the answer's body come."""
        self.place = place
        self._on_body = on_body
        self._stall_s = stall_s
        self._deadline = deadline
        self._last = time.monotonic()

    def left(self) -> float:
        """Seconds the next step may take. Raises SourceStalled when there are none."""
        now = time.monotonic()
        if now >= self._deadline:
            raise SourceStalled(f"{self.place} was too slow: the read's deadline has passed")
        if now - self._last >= self._stall_s:
            raise SourceStalled(f"{self.place} sent nothing for {self._stall_s:g} s")
        # A fill that times out with some bytes does not tell when they came: so ask often enough.
        return min(self._stall_s / 4, self._deadline - now)

    def renew(self, *, body: bool = False) -> None:
        """Say that bytes came; `body`: of the answer's body."""
        self._last = time.monotonic()
        if body and self._on_body is not None:
            self._on_body()


def dial(place: Place, context: ssl.SSLContext | None, stall_s: float, deadline: float) -> Stream:
    """Connect. Raises SourceGone, SourceStalled or SourceUnreachable."""
    seconds = min(stall_s, CONNECT_S, deadline - time.monotonic())
    if seconds <= 0:
        raise SourceStalled(f"{place} was too slow: the read's deadline has passed")
    try:
        connected = socket.create_connection((place.host, place.port), timeout=seconds)
        if context is None:
            return PlainStream(connected)
        stream = TlsStream(
            context.wrap_socket(connected, server_hostname=place.host, do_handshake_on_connect=False)
        )
        try:
            stream.handshake(seconds)
        except OSError:
            stream.close()
            raise
        return stream
    except TimeoutError:
        raise SourceUnreachable(f"no connection to {place} within {seconds:.1f} s") from None
    except OSError as error:
        raise SourceGone(f"cannot connect to {place}: {error}") from error


def ask(
    stream: Stream, begin: int, end: int, token: str, etag: str, patience: Patience
) -> tuple[ResponseHead, bytes]:
    """Ask for file range `[begin, end)`: the answer's head, and what of its body came along with it.

    Raises SourceStalled, SourceCorrupt for what is not HTTP, or OSError when the connection drops.
    """
    lines = [
        f"GET {patience.place.target} HTTP/1.1",
        f"Host: {patience.place.authority}",
        f"Range: bytes={begin}-{end - 1}",
        "Accept-Encoding: identity",
    ]
    if token:
        if not _VISIBLE.fullmatch(token):
            raise LeaseRefused("a lease token cannot hold spaces or control characters")
        lines.append(f"Authorization: Bearer {token}")
    # Weak tags never match (RFC 9110 13.1.1).
    if etag and not etag.startswith("W/") and _VISIBLE.fullmatch(etag):
        lines.append(f"If-Match: {etag}")
    try:
        stream.send(["\r\n".join([*lines, "", ""]).encode("ascii")], patience.left())
    except TimeoutError:
        raise SourceStalled(f"{patience.place} does not read our request") from None
    received = b""
    try:
        while (parsed := parse_response(received, LARGEST_HEAD)) is None:
            data = _receive(stream, 4096, patience)
            if not data:
                raise ConnectionResetError("closed before it answered")
            received += data
    except BadHead as error:
        raise SourceCorrupt(f"{patience.place} does not answer in HTTP: {error}") from None
    return parsed


def fill(stream: Stream, cursor: Cursor, count: int, patience: Patience) -> None:
    """Receive `count` bytes into the cursor.

    Raises SourceStalled, TargetError for read-only memory, or OSError when the connection drops.
    """
    while count:
        try:
            received = stream.receive_into(cursor, count, patience.left())
        except TimeoutError:
            continue
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise TargetError("the target's own memory cannot be written") from error
            raise
        if received == 0:
            raise ConnectionResetError(f"closed with {count} bytes to come")
        patience.renew(body=True)
        count -= received


def refused(stream: Stream, response: ResponseHead, body: bytes, patience: Patience) -> RforkError:
    """What an answer other than 206 means, with the server's own words if it gave any in plain text."""
    place, status = patience.place, response.status
    if status == 200:
        return SourceCorrupt(f"{place} ignores Range: it would send the whole file")
    fields = response.fields
    length = fields.get("content-length", "")
    if fields.get("content-type", "").startswith("text/plain") and length.isdecimal() and len(length) < 10:
        most = min(int(length), LARGEST_REASON)
        while len(body) < most and (data := _receive(stream, most - len(body), patience)):
            body += data
    reason = " ".join(body[:LARGEST_REASON].decode("utf-8", "replace").split()) if length else ""
    kind = _MEANING.get(status, SourceGone if status >= 500 else SourceCorrupt)
    return kind(f"{place} answers {status}: {reason or 'no reason given'}")


def _receive(stream: Stream, most: int, patience: Patience) -> bytes:
    while True:
        try:
            data = stream.receive(most, patience.left())
        except TimeoutError:
            continue
        patience.renew()
        return data
