"""Connection between two processes of a host: JSON packets with descriptors, errors included. For both sides."""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from rfork.errors import (
    LeaseRejected,
    NotSameHost,
    PeerAccessUnavailable,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
    TargetError,
    TransportUnavailable,
    VersionMismatch,
)
from rfork.schema import MAX_TEXT_LENGTH

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Message: TypeAlias = Mapping[str, JsonValue]

MAX_MESSAGE_BYTES: Final = 64 << 10
"""Maximum bytes of one packet."""

_ERROR_TYPES: Final[Mapping[str, type[RforkError]]] = {
    error_type.__name__: error_type
    for error_type in (
        LeaseRejected,
        PeerAccessUnavailable,
        NotSameHost,
        SourceBusy,
        SourceWeightsChanged,
        SourceCorrupt,
        SourceUnavailable,
        SourceTimeout,
        TransportUnavailable,
        VersionMismatch,
    )
}


def encode(message: Message) -> bytes:
    """Encode a message as one packet. Raises ValueError if it is too large."""
    packet = json.dumps(message, separators=(",", ":")).encode()
    if len(packet) > MAX_MESSAGE_BYTES:
        raise ValueError(f"the message has {len(packet)} bytes, more than {MAX_MESSAGE_BYTES}")
    return packet


def decode(packet: bytes) -> Message:
    """Decode a packet. Raises SourceCorrupt if it is invalid."""
    try:
        message: JsonValue = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise SourceCorrupt(f"not a message: {error}") from None
    if not isinstance(message, dict):
        raise SourceCorrupt("not a message: not a JSON object")
    return message


def get_str(message: Message, name: str) -> str:
    """Return a text field. Raises SourceCorrupt if it is missing or of another type."""
    value = message.get(name)
    if not isinstance(value, str):
        raise SourceCorrupt(f"the message lacks the text {name!r}")
    return value


def get_int(message: Message, name: str) -> int:
    """Return an integer field. Raises SourceCorrupt if it is missing or of another type."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SourceCorrupt(f"the message lacks the number {name!r}")
    return value


def get_ints(message: Message, name: str) -> list[int]:
    """Return a field with a list of integers. Raises SourceCorrupt if it is missing or of another type."""
    value = message.get(name)
    numbers = [part for part in value if type(part) is int] if isinstance(value, list) else []
    if not isinstance(value, list) or len(numbers) != len(value):
        raise SourceCorrupt(f"the message lacks the numbers {name!r}")
    return numbers


def encode_error(error: RforkError) -> Message:
    """Encode an error, to be raised on the other side. Runs on the source."""
    return {"error": error.kind, "detail": str(error)[:MAX_TEXT_LENGTH], "hint": error.hint[:MAX_TEXT_LENGTH]}


def raise_error(message: Message) -> None:
    """Raise the error in a message, if it is one. Runs on the target.

    Known errors of the source and its gate are raised unchanged, any other as SourceUnavailable, so that the
    other side cannot blame this side.
    """
    error_name = message.get("error")
    if error_name is None:
        return
    detail, hint = message.get("detail"), message.get("hint")
    text = detail if isinstance(detail, str) and detail else f"the source reports {error_name!r}"
    error_type = _ERROR_TYPES.get(error_name, SourceUnavailable) if isinstance(error_name, str) else SourceUnavailable
    raise error_type(text[:MAX_TEXT_LENGTH], hint=hint[:MAX_TEXT_LENGTH] if isinstance(hint, str) else "")


MAX_FDS: Final = 64
"""Maximum number of descriptors in a valid message."""
_SCM_MAX_FD: Final = 253
"""Linux's own maximum. With space for all of them, the kernel never closes any, which could block."""
_FD_BYTES: Final = array.array("i").itemsize


class UnixSocketConnection:
    """A connected Unix socket of type SOCK_SEQPACKET. Used by one thread at a time; any thread may `abort`
    it.

    Owns the socket. Both sides use it: on the source, SourceUnavailable, SourceTimeout and SourceCorrupt are failures
    of the reader.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._closed = False

    def send(self, message: Message, descriptors: Sequence[int] = (), *, deadline: float) -> None:
        """Send one message; the caller keeps its descriptors. `deadline` is a `time.monotonic()` value.

        Raises SourceUnavailable, SourceTimeout at the deadline, or ValueError for a message that is too
        large.
        """
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._socket.settimeout(_remaining(deadline))
            self._socket.sendmsg([encode(message)], ancillary, socket.MSG_NOSIGNAL)
        except TimeoutError:
            raise SourceTimeout("the other side did not accept a message in time") from None
        except OSError as error:
            raise SourceUnavailable(f"the connection is closed: {error.strerror or error}") from None

    def receive(self, deadline: float) -> tuple[Message, list[int]]:
        """Return the next message and its descriptors, which the caller must close; they are close-on-exec.

        Raises SourceUnavailable if the other side closed or died, SourceTimeout at the deadline,
        SourceCorrupt for an invalid message, and TargetError if the kernel denies this process the
        descriptors.
        """
        try:
            self._socket.settimeout(_remaining(deadline))
            # One byte more than allowed, to detect a message that is too large.
            packet, ancillary, flags, _ = self._socket.recvmsg(
                MAX_MESSAGE_BYTES + 1,
                socket.CMSG_SPACE(_SCM_MAX_FD * _FD_BYTES),
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
                    "the kernel did not pass the other side's descriptor: this process has too many open, "
                    "or a security module (SELinux, AppArmor) denies it",
                    hint="raise the limit (ulimit -n), or run both sides with the same security label",
                )
            if not packet:
                raise SourceUnavailable("the other side closed the connection")
            if len(packet) > MAX_MESSAGE_BYTES:
                raise SourceCorrupt(f"not a message: more than {MAX_MESSAGE_BYTES} bytes")
            return decode(packet), descriptors
        except BaseException:
            close_all(descriptors)
            raise

    def exchange(self, request: Message, deadline: float) -> tuple[Message, list[int]]:
        """Send a request; return the reply and its descriptors, which the caller must close.

        Raises the error in the reply, and as `send` and `receive`.
        """
        self.send(request, deadline=deadline)
        reply, descriptors = self.receive(deadline)
        try:
            raise_error(reply)
        except BaseException:
            close_all(descriptors)
            raise
        return reply, descriptors

    @property
    def is_idle(self) -> bool:
        """True if the connection is open and no data is pending, as required for reuse."""
        with self._lock:
            if self._closed:
                return False
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)

    def abort(self) -> None:
        """Shut down both directions, from any thread; a blocked thread raises SourceUnavailable."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):  # closed by the other side first
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, on the thread that uses it. Idempotent.

        May block if an unauthenticated client sent descriptors that were never received, so the lock is released
        first.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._socket.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Close received descriptors; errors from closing them are ignored."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, message_type, data in ancillary:
        if level == socket.SOL_SOCKET and message_type == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return list(found)


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
