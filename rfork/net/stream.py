"""Transfers bytes between a socket and the tensors' memory, scattered over many views, with timeouts.

Used on both sides of the http transport. A plain socket transfers up to 1024 views (IOV_MAX) per system call
without a copy in user space; TLS copies, one view at a time.

Timeouts are in seconds. Plain sockets stay in blocking mode with kernel timeouts (SO_RCVTIMEO): with
MSG_WAITALL, one call then fills many views and acquires the GIL once, not once per TCP segment.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain

Bytes = bytes | memoryview

MAX_VIEWS = 1024
"""IOV_MAX on Linux: maximum views of one sendmsg or recvmsg."""
NO_LINGER = struct.pack("ii", 1, 0)
SEND_TIMEOUT_S = 1.0
"""Maximum seconds of one sending system call; bounds the delay if the kernel fails to wake it."""
TLS_PIECE = 256 << 10
"""Bytes per TLS write: enough to amortise the call, small enough for the cache."""


class ScatterCursor:
    """Position in a sequence of views that are filled or sent in order.

    `more` yields further views step by step; the next step is requested when all earlier ones are done.
    `left` is the number of remaining bytes of the current step: 0 only after the last step.
    """

    def __init__(self, views: Sequence[Bytes], more: Iterable[Sequence[Bytes]] = ()) -> None:
        self._steps = chain((views,), more)
        self._views: list[memoryview] = []
        self._ends: list[int] = []  # of the current step's views, relative to the start of the first step
        self.done = self.left = self._index = 0
        self._next()

    def window(self, max_bytes: int, max_views: int = MAX_VIEWS) -> list[memoryview]:
        """Return the next views, limited to this many bytes and views."""
        if not self.left or max_bytes <= 0:
            return []
        first, max_done = self._index, self.done + max_bytes
        stop = min(bisect_left(self._ends, max_done, first) + 1, first + max_views, len(self._views))
        window = self._views[first:stop]
        if (excess := self._ends[stop - 1] - max_done) > 0:
            window[-1] = window[-1][:-excess]
        if skip := self.done + len(self._views[first]) - self._ends[first]:
            window[0] = window[0][skip:]
        return window

    def advance(self, count: int) -> None:
        """Mark the next `count` bytes as done."""
        self.done += count
        self.left -= count
        self._index = bisect_right(self._ends, self.done, self._index)
        if not self.left:
            self._next()

    def write_bytes(self, data: bytes) -> None:
        """Copy `data` to the current position; for the few bytes received with a message head."""
        source = memoryview(data)
        while source:
            target = self.window(len(source), 1)[0]
            target[:] = source[: target.nbytes]
            source = source[target.nbytes :]
            self.advance(target.nbytes)

    def _next(self) -> None:
        for views in self._steps:
            self._views = [view if isinstance(view, memoryview) else memoryview(view) for view in views if len(view)]
            self._ends = list(accumulate(map(len, self._views), initial=self.done))[1:]
            self._index = 0
            if self._ends:
                self.left = self._ends[-1] - self.done
                break


class Stream(ABC):
    """One connection over TCP. Used by one thread at a time; any thread may `abort` it."""

    def __init__(self, raw_socket: socket.socket) -> None:
        raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._raw_socket = raw_socket
        self._close_lock = threading.Lock()

    @abstractmethod
    def handshake(self, timeout: float) -> None:
        """Set up the connection. Raises TimeoutError or another OSError."""

    @abstractmethod
    def receive(self, max_bytes: int, timeout: float) -> bytes:
        """Receive up to `max_bytes` bytes; none at the end of the stream. Raises TimeoutError or another
        OSError.
        """

    @abstractmethod
    def receive_into(self, cursor: ScatterCursor, max_bytes: int, timeout: float) -> int:
        """Receive up to `max_bytes` bytes into the cursor within `timeout`, advance it, and return the number
        of bytes.

        Returns 0 at the end of the stream. Raises TimeoutError if none arrived, or another OSError.
        """

    @abstractmethod
    def send(self, views: Sequence[Bytes], timeout: float) -> None:
        """Send all views. Raises TimeoutError (the stream is then unusable) or another OSError."""

    def shutdown_write(self) -> None:
        """Signal the end of sent data; receiving continues."""
        _shut_down(self._raw_socket, socket.SHUT_WR)

    def abort(self) -> None:
        """Shut down the connection and wake a thread blocked on it. Safe from any thread."""
        with self._close_lock:
            _shut_down(self._raw_socket, socket.SHUT_RDWR)

    def close(self, *, discard: bool = False) -> None:
        """Close the socket. Only for the thread that uses the stream.

        `discard`: the kernel drops sent bytes that the other side has not received. Otherwise it would deliver them
        once the network works again, perhaps many seconds later.
        """
        # With the lock, a concurrent `abort` cannot shut down the next socket that gets this descriptor.
        with self._close_lock:
            if discard:
                with suppress(OSError):  # some systems refuse options of a connection that was shut down
                    self._raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            self._raw_socket.close()


class PlainStream(Stream):
    """A `Stream` over plain TCP."""

    def __init__(self, raw_socket: socket.socket) -> None:
        super().__init__(raw_socket)
        raw_socket.settimeout(None)
        self._socket = raw_socket
        self._limits: dict[int, float] = {}

    def handshake(self, timeout: float) -> None:
        """Does nothing: plain TCP needs no handshake."""

    def receive(self, max_bytes: int, timeout: float) -> bytes:
        """See `Stream`."""
        self._set_timeout(socket.SO_RCVTIMEO, timeout)
        try:
            return self._socket.recv(max_bytes)
        except BlockingIOError:
            raise TimeoutError("no data received in time") from None

    def receive_into(self, cursor: ScatterCursor, max_bytes: int, timeout: float) -> int:
        """See `Stream`."""
        self._set_timeout(socket.SO_RCVTIMEO, timeout)
        try:
            count = self._socket.recvmsg_into(cursor.window(max_bytes), 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("no data received in time") from None
        cursor.advance(count)
        return count

    def send(self, views: Sequence[Bytes], timeout: float) -> None:
        """See `Stream`."""
        cursor = ScatterCursor(views)
        deadline = time.monotonic() + timeout
        while cursor.left:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(f"the other side does not read: {cursor.left} bytes not sent")
            self._set_timeout(socket.SO_SNDTIMEO, min(remaining_s, SEND_TIMEOUT_S))
            try:
                cursor.advance(self._socket.sendmsg(cursor.window(cursor.left)))
            except BlockingIOError:
                continue

    def _set_timeout(self, option: int, seconds: float) -> None:
        if seconds <= 0:
            raise TimeoutError("timed out")
        if self._limits.get(option) != seconds:
            # A zero timeval would mean no timeout.
            full_seconds, microseconds = divmod(max(1000, math.ceil(seconds * 1e6)), 1_000_000)
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", full_seconds, microseconds))
            self._limits[option] = seconds


class TlsStream(Stream):
    """A `Stream` over TLS.

    It is shut down as a TCP connection, not by SSLSocket's methods: those drop the TLS state immediately, and
    a thread that is receiving would then return ciphertext.
    """

    def __init__(self, raw_socket: ssl.SSLSocket) -> None:
        super().__init__(raw_socket)
        self._socket = raw_socket

    def handshake(self, timeout: float) -> None:
        """See `Stream`."""
        self._set_timeout(timeout)
        self._socket.do_handshake()

    def receive(self, max_bytes: int, timeout: float) -> bytes:
        """See `Stream`."""
        self._set_timeout(timeout)
        return self._socket.recv(max_bytes)

    def receive_into(self, cursor: ScatterCursor, max_bytes: int, timeout: float) -> int:
        """See `Stream`."""
        self._set_timeout(timeout)
        count = self._socket.recv_into(cursor.window(max_bytes, 1)[0])
        cursor.advance(count)
        return count

    def send(self, views: Sequence[Bytes], timeout: float) -> None:
        """See `Stream`."""
        deadline = time.monotonic() + timeout
        for piece in _chunked(views, TLS_PIECE):
            self._set_timeout(deadline - time.monotonic())
            self._socket.sendall(piece)

    def _set_timeout(self, seconds: float) -> None:
        if seconds <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(seconds)


def _shut_down(raw_socket: socket.socket, direction: int) -> None:
    try:
        socket.socket.shutdown(raw_socket, direction)
    except OSError:
        # The other side closed the connection first.
        return


def _chunked(views: Sequence[Bytes], size: int) -> Iterator[Bytes]:
    """Yield the same bytes in pieces of at most `size`; small views are joined, large ones split."""
    cursor = ScatterCursor(views)
    while cursor.left:
        window = cursor.window(size)
        piece = window[0] if len(window) == 1 else b"".join(window)
        yield piece
        cursor.advance(len(piece))
