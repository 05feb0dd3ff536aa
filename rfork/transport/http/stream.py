"""Bytes between a connected socket and the tensors' memory, scattered over many views, with time limits.

Both sides of the http transport use these. A plain socket moves up to 1024 views (IOV_MAX) in one
system call and copies nothing in user space; TLS copies as it must, one view at a time.

Timeouts are in seconds. Plain sockets stay in blocking mode with kernel timeouts (SO_RCVTIMEO): with
MSG_WAITALL one call then fills many views and takes the GIL back once, not once a TCP segment.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Protocol

Bytes = bytes | memoryview

MAX_VIEWS = 1024
"""IOV_MAX on Linux: most views in one sendmsg or recvmsg."""
SEND_S = 1.0
"""Most seconds of one system call that sends: no more is lost where the kernel fails to wake it."""
TLS_PIECE = 256 << 10
"""Bytes handed to one TLS write: enough to amortise the call, small enough to stay in the cache."""


class ScatterCursor:
    """A place in a line of views that are filled or sent in order.

    `more` gives the views behind these, step by step, and is asked for a step once all before it is done.
    `left` are the bytes to go of the step that is under way: 0 only where there is no step behind it.
    """

    def __init__(self, views: Sequence[Bytes], more: Iterable[Sequence[Bytes]] = ()) -> None:
        self._steps = chain((views,), more)
        self._views: list[memoryview] = []
        self._ends: list[int] = []  # of the step's views, counted from the first step's begin
        self.done = self.left = self._index = 0
        self._next()

    def window(self, max_bytes: int, max_views: int = MAX_VIEWS) -> list[memoryview]:
        """The next views, at most this many bytes and views."""
        if not self.left or max_bytes <= 0:
            return []
        first, until = self._index, self.done + max_bytes
        stop = min(bisect_left(self._ends, until, first) + 1, first + max_views, len(self._views))
        window = self._views[first:stop]
        if (excess := self._ends[stop - 1] - until) > 0:
            window[-1] = window[-1][:-excess]
        if skip := self.done + len(self._views[first]) - self._ends[first]:
            window[0] = window[0][skip:]
        return window

    def advance(self, count: int) -> None:
        """Say that the next `count` bytes are done."""
        self.done += count
        self.left -= count
        self._index = bisect_right(self._ends, self.done, self._index)
        if not self.left:
            self._next()

    def write_bytes(self, data: bytes) -> None:
        """Copy `data` in at this place; for the few bytes that came along with a message head."""
        source = memoryview(data)
        while source:
            target = self.window(len(source), 1)[0]
            target[:] = source[: target.nbytes]
            source = source[target.nbytes :]
            self.advance(target.nbytes)

    def _next(self) -> None:
        for views in self._steps:
            self._views = [memoryview(view) for view in views if len(view)]
            self._ends = list(accumulate(map(len, self._views), initial=self.done))[1:]
            self._index = 0
            if self._ends:
                self.left = self._ends[-1] - self.done
                break


class Stream(Protocol):
    """One connection. One thread uses it at a time; any thread may `abort` it."""

    def handshake(self, timeout: float) -> None:
        """What comes before the first byte. Raises TimeoutError or another OSError."""
        ...

    def receive(self, max_bytes: int, timeout: float) -> bytes:
        """Up to `max_bytes` bytes; none at the end of the stream. Raises TimeoutError or another OSError."""
        ...

    def receive_into(self, cursor: ScatterCursor, max_bytes: int, timeout: float) -> int:
        """Fill from the cursor on and advance it: how many bytes, up to `max_bytes`, came within `timeout`.

        Returns 0 at the end of the stream. Raises TimeoutError when none came, or another OSError.
        """
        ...

    def send(self, views: Sequence[Bytes], timeout: float) -> None:
        """Send all of it. Raises TimeoutError (the stream is of no use after) or another OSError."""
        ...

    def shutdown_write(self) -> None:
        """Tell the other side that nothing more comes; receiving goes on."""
        ...

    def abort(self) -> None:
        """End the connection; a thread blocked on it wakes. Safe from any thread."""
        ...

    def close(self) -> None:
        """Give the socket back. Only for the thread that uses the stream."""
        ...


class _SocketStream:
    """What ending a connection takes, plain or TLS."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connected = connected
        self._ending = threading.Lock()

    def shutdown_write(self) -> None:
        """See `Stream`."""
        _shut_down(self._connected, socket.SHUT_WR)

    def abort(self) -> None:
        """See `Stream`."""
        with self._ending:
            _shut_down(self._connected, socket.SHUT_RDWR)

    def close(self) -> None:
        """See `Stream`."""
        # Under the lock: a `abort` on its way must not hit the next socket that gets this descriptor.
        with self._ending:
            self._connected.close()


class PlainStream(_SocketStream):
    """A `Stream` over plain TCP."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        connected.settimeout(None)
        self._socket = connected
        self._limits: dict[int, float] = {}

    def handshake(self, timeout: float) -> None:
        """Plain TCP needs none."""

    def receive(self, max_bytes: int, timeout: float) -> bytes:
        """See `Stream`."""
        self._set_timeout(socket.SO_RCVTIMEO, timeout)
        try:
            return self._socket.recv(max_bytes)
        except BlockingIOError:
            raise TimeoutError("nothing came in time") from None

    def receive_into(self, cursor: ScatterCursor, max_bytes: int, timeout: float) -> int:
        """See `Stream`."""
        self._set_timeout(socket.SO_RCVTIMEO, timeout)
        try:
            count = self._socket.recvmsg_into(cursor.window(max_bytes), 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("nothing came in time") from None
        cursor.advance(count)
        return count

    def send(self, views: Sequence[Bytes], timeout: float) -> None:
        """See `Stream`."""
        cursor = ScatterCursor(views)
        until = time.monotonic() + timeout
        while cursor.left:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"the other side does not read: {cursor.left} bytes to send")
            self._set_timeout(socket.SO_SNDTIMEO, min(left_s, SEND_S))
            try:
                cursor.advance(self._socket.sendmsg(cursor.window(cursor.left)))
            except BlockingIOError:
                continue

    def _set_timeout(self, option: int, seconds: float) -> None:
        if seconds <= 0:
            raise TimeoutError("out of time")
        if self._limits.get(option) != seconds:
            # A zero timeval would mean "for ever".
            whole_seconds, micro = divmod(max(1000, math.ceil(seconds * 1e6)), 1_000_000)
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole_seconds, micro))
            self._limits[option] = seconds


class TlsStream(_SocketStream):
    """A `Stream` over TLS.

    It is ended as a TCP connection, not by SSLSocket's methods: those drop the TLS state at once, and a
    thread that is in the middle of receiving would go on with ciphertext.
    """

    def __init__(self, connected: ssl.SSLSocket) -> None:
        super().__init__(connected)
        self._socket = connected

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
        until = time.monotonic() + timeout
        for piece in _chunked(views, TLS_PIECE):
            self._set_timeout(until - time.monotonic())
            self._socket.sendall(piece)

    def _set_timeout(self, seconds: float) -> None:
        if seconds <= 0:
            raise TimeoutError("out of time")
        self._socket.settimeout(seconds)


def _shut_down(connected: socket.socket, how: int) -> None:
    try:
        socket.socket.shutdown(connected, how)
    except OSError:
        # The other side was faster: there is no connection left to end.
        return


def _chunked(views: Sequence[Bytes], size: int) -> Iterator[Bytes]:
    """The same bytes in pieces of at most `size`; small views are joined, large ones cut."""
    cursor = ScatterCursor(views)
    while cursor.left:
        window = cursor.window(size)
        piece = window[0] if len(window) == 1 else b"".join(window)
        yield piece
        cursor.advance(len(piece))
