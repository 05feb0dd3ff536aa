"""One connection between two processes of a host: packets of JSON, and descriptors beside them."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final

from rfork.errors import SourceCorrupt, SourceTimeout, SourceUnavailable, TargetError
from rfork.transport.unix_socket.messages import MAX_MESSAGE_BYTES, Message, decode, encode

MAX_FDS: Final = 64
"""Descriptors beside one message, at most."""
_MAX_FDS_PER_MESSAGE: Final = 253
"""The kernel sends no more at once; with room for all, none is closed, which may take long, in the kernel."""
_ITEM = array.array("i").itemsize


class UnixSocketConnection:
    """A connected Unix socket of kind SOCK_SEQPACKET. One thread at a time uses it; any may cut it.

    The same on both sides: who serves calls the other one's failures SourceUnavailable and so on as well. It owns
    the socket.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._closed = False

    def send(self, message: Message, descriptors: Sequence[int] = (), *, deadline: float) -> None:
        """Send one message; descriptors stay the caller's. `deadline` is a `time.monotonic()` value.

        Raises SourceUnavailable, SourceTimeout at the deadline, or ValueError for a message that is too large.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        try:
            self._socket.settimeout(_remaining(deadline))
            self._socket.sendmsg([encode(message)], [rights] if descriptors else [], socket.MSG_NOSIGNAL)
        except TimeoutError:
            raise SourceTimeout("the other side did not take a message in time") from None
        except OSError as error:
            raise SourceUnavailable(f"the connection is closed: {error.strerror or error}") from None

    def receive(self, deadline: float) -> tuple[Message, list[int]]:
        """The next message and its descriptors, the caller's to close; none outlives an exec.

        Raises SourceUnavailable when the other side closed or died, SourceTimeout at the deadline, SourceCorrupt
        for what is not a message, and TargetError when the kernel gives this process no descriptors.
        """
        try:
            self._socket.settimeout(_remaining(deadline))
            # One byte more than allowed, to see that it was too much.
            packet, ancillary, flags, _ = self._socket.recvmsg(
                MAX_MESSAGE_BYTES + 1,
                socket.CMSG_SPACE(_MAX_FDS_PER_MESSAGE * _ITEM),
                socket.MSG_CMSG_CLOEXEC,
            )
        except TimeoutError:
            raise SourceTimeout("the other side sent nothing in time") from None
        except OSError as error:
            raise SourceUnavailable(f"the connection is closed: {error.strerror or error}") from None
        descriptors = _descriptors(ancillary)
        try:
            if len(descriptors) > MAX_FDS:
                raise SourceCorrupt(f"not a message: more than {MAX_FDS} descriptors")
            if flags & socket.MSG_CTRUNC:
                raise TargetError(
                    "the kernel gives this process no descriptor of the other side's: it has too many open, "
                    "or a security module (SELinux, AppArmor) forbids it",
                    hint="raise the limit (ulimit -n), or run both sides under one security label",
                )
            if not packet:
                raise SourceUnavailable("the other side closed the connection")
            if len(packet) > MAX_MESSAGE_BYTES:
                raise SourceCorrupt(f"not a message: more than {MAX_MESSAGE_BYTES} bytes")
            return decode(packet), descriptors
        except BaseException:
            close_all(descriptors)
            raise

    @property
    def is_idle(self) -> bool:
        """Whether it is open and nothing has come that nobody asked for: what one kept for later must be."""
        with self._lock:
            if self._closed:
                return False
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)

    def abort(self) -> None:
        """End it for both sides, from any thread: whoever is blocked in it raises SourceUnavailable."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):  # the other side was first
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; by the thread that uses it. Safe to call twice.

        It may take as long as a stranger likes who sent descriptors that were never received: so nobody else
        waits for it.
        """
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._socket.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that nobody wants. What a stranger's file says as it is closed changes nothing."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, message_type, data in ancillary:
        if level == socket.SOL_SOCKET and message_type == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _ITEM])
    return list(found)


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
