"""An HTTP response on a connection: its head, then its body in pieces or directly into the caller's memory."""

from __future__ import annotations

import errno
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Final

from rfork.errors import TargetError
from rfork.net.http_heads import MalformedMessage, ResponseHead, parse_response
from rfork.net.stream import ScatterCursor, Stream

MAX_HEAD_BYTES: Final = 64 << 10
MAX_CHUNK_LINE_BYTES: Final = 4096
PIECE_BYTES: Final = 64 << 10
"""Maximum bytes of one piece of a body that is not read into the caller's memory."""

_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[\t ]*(?:;.*)?")


class StalledResponse(Exception):
    """A response was too slow. The text is a predicate: "sent nothing for 5 s"."""


class ConnectionEnded(ConnectionResetError):
    """The server closed the connection before the end of its response."""


class ReadTimeout:
    """Time limits of one response, with a callback if it takes long.

    The head, or an error response with its body, must arrive within `timeout_s`; after that, `min_bytes` of
    the body in each `timeout_s`, so that servers that only trickle are detected. All ends by `deadline`
    (`time.monotonic()` value). `on_slow` is called `due_s` seconds after the request was sent, and returns
    the seconds until it should be called again.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        deadline: float = math.inf,
        min_bytes: int = 1,
        due_s: float | None = None,
        on_slow: Callable[[], float | None] | None = None,
    ) -> None:
        self.deadline = deadline
        self._timeout_s = timeout_s
        self._min_bytes = min_bytes
        self._on_slow = on_slow
        self.began = self._since = time.monotonic()
        self._received_bytes = 0
        self._due = self.began + due_s if due_s is not None and on_slow is not None else None

    def remaining(self) -> float:
        """Return the seconds until the response counts as stalled. Raises StalledResponse if there are none."""
        now = time.monotonic()
        if now >= self.deadline:
            raise StalledResponse("was too slow: the deadline has passed")
        if now - self._since >= self._timeout_s:
            received = f"only {self._received_bytes} bytes in" if self._received_bytes else "nothing for"
            raise StalledResponse(f"sent {received} {self._timeout_s:g} s")
        return min(self._since + self._timeout_s, self.deadline) - now

    def step(self) -> float:
        """Return the seconds that the next receive may take. Raises StalledResponse."""
        # A receive that times out with partial data does not report when it arrived, so poll often enough.
        step = min(self._timeout_s / 4, self.remaining())
        if self._due is not None and self._on_slow is not None:
            now = time.monotonic()
            if now >= self._due:
                again_s = self._on_slow()
                self._due = now + again_s if again_s is not None else None
            if self._due is not None:
                step = min(step, self._due - now)
        return max(step, 0.001)

    def record(self, count: int) -> None:
        """Record received bytes of a head or of an error response's body."""
        self._received_bytes += count

    def record_body(self, count: int) -> None:
        """Record received bytes of a body; restarts the timeout after enough of them."""
        self._received_bytes += count
        if self._received_bytes >= self._min_bytes:
            self.reset()

    def reset(self) -> None:
        """Restart the timeout."""
        self._since, self._received_bytes = time.monotonic(), 0


class HttpResponse:
    """A response whose head has arrived. Its body is read once, by `fill`, `pieces` or `text`.

    Reading raises StalledResponse, MalformedMessage, or an OSError: ConnectionEnded if the server closed the
    connection.
    """

    def __init__(self, stream: Stream, timeout: ReadTimeout, head: ResponseHead, buffered: bytes) -> None:
        """`buffered`: the part of the body that arrived with the head."""
        self.head = head
        self.timeout = timeout
        self.is_complete = False
        """True once the body was read to its end."""
        self._stream = stream
        self._buffered = buffered

    @classmethod
    def receive(cls, stream: Stream, timeout: ReadTimeout) -> HttpResponse:
        """Receive a head. Raises the same errors as reading a body."""
        received = b""
        while (parsed := parse_response(received, MAX_HEAD_BYTES)) is None:
            data = _receive(stream, 4096, timeout)
            if not data:
                raise ConnectionEnded("connection closed before a response")
            timeout.record(len(data))
            received += data
        return cls(stream, timeout, *parsed)

    def fill(self, cursor: ScatterCursor, count: int) -> None:
        """Receive a body of `count` bytes into the cursor. Raises TargetError if its memory is read-only."""
        if len(self._buffered) > count:
            raise MalformedMessage(f"more than the {count} bytes requested")
        cursor.write_bytes(self._buffered)
        left = count - len(self._buffered)
        self.timeout.reset()
        while left:
            try:
                received = self._stream.receive_into(cursor, left, self.timeout.step())
            except TimeoutError:
                continue  # `step` raises after the timeout
            except OSError as error:
                if error.errno == errno.EFAULT:
                    raise TargetError("the target's memory is not writable") from error
                raise
            if not received:
                raise ConnectionEnded(f"connection closed with {left} bytes missing")
            self.timeout.record_body(received)
            left -= received
        self.is_complete = True

    def pieces(self) -> Iterator[bytes]:
        """Yield the body piece by piece, without its transfer coding (RFC 9112, sections 6 and 7)."""
        fields = self.head.fields
        length = fields.get("content-length", "")
        if "transfer-encoding" in fields:
            if fields["transfer-encoding"].lower() != "chunked":
                raise MalformedMessage("an unsupported transfer coding")
            yield from self._chunks()
        elif self.head.status in (204, 304):
            pass
        elif length:
            if not length.isdecimal() or len(length) > 18:
                raise MalformedMessage("an invalid Content-Length")
            yield from self._exactly(int(length))
        else:
            while piece := self._next_piece(PIECE_BYTES):
                yield piece
            return  # the end of the connection
        self.is_complete = not self._buffered

    def text(self, max_bytes: int) -> bytes:
        """Return the body of an error response, up to a limit, as far as it arrives: the status must suffice."""
        body = b""
        try:
            for piece in self.pieces():
                body += piece
                if len(body) > max_bytes:
                    break
        except (StalledResponse, MalformedMessage, OSError):
            pass
        return body[:max_bytes]

    def _chunks(self) -> Iterator[bytes]:
        while True:
            size = _CHUNK_SIZE.fullmatch(self._line())
            if size is None:
                raise MalformedMessage("an invalid chunk")
            count = int(size.group(1), 16)
            if count == 0:
                break
            yield from self._exactly(count)
            if self._line():
                raise MalformedMessage("an invalid chunk")
        while self._line():  # trailer fields
            pass

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffered:
            if len(self._buffered) > MAX_CHUNK_LINE_BYTES:
                raise MalformedMessage("an invalid chunk")
            self._buffered += self._receive_more()
        line, _, self._buffered = self._buffered.partition(b"\r\n")
        return line

    def _exactly(self, count: int) -> Iterator[bytes]:
        while count:
            piece = self._next_piece(min(count, PIECE_BYTES))
            if not piece:
                raise ConnectionEnded(f"connection closed with {count} bytes missing")
            count -= len(piece)
            yield piece

    def _next_piece(self, max_bytes: int) -> bytes:
        """Return up to `max_bytes` bytes; none at the end of the connection."""
        if not self._buffered:
            self._buffered = self._receive_body()
        piece, self._buffered = self._buffered[:max_bytes], self._buffered[max_bytes:]
        return piece

    def _receive_more(self) -> bytes:
        data = self._receive_body()
        if not data:
            raise ConnectionEnded("connection closed in a chunk")
        return data

    def _receive_body(self) -> bytes:
        data = _receive(self._stream, PIECE_BYTES, self.timeout)
        self.timeout.record_body(len(data))
        return data


def _receive(stream: Stream, max_bytes: int, timeout: ReadTimeout) -> bytes:
    while True:
        try:
            return stream.receive(max_bytes, timeout.step())
        except TimeoutError:
            continue  # `step` raises after the timeout
