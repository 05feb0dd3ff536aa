"""One Mooncake engine, made safe to hold: typed, never called before it runs, quick to take down.

Both sides have one. Creating it takes about 1 ms and two threads, so each source and each reader gets
its own: a silent peer blocks only the engine that spoke to it, and a source that restarted on the
same port is not mistaken for its predecessor.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from enum import Enum

from rfork.errors import (
    RforkError,
    SourceTimeout,
    SourceUnavailable,
    TransportUnavailable,
)
from rfork.image.registration import Region
from rfork.transport.bpf_filter import PacketFilter
from rfork.transport.mooncake.library import NativeEngine, WireProtocol, start_engine

_METADATA, _PROBE = 1, 3
"""Mooncake's handshake messages for "send your segment's description" and "are you there"."""
_MAX_RESPONSE_BYTES = 1 << 20
_ACCEPT_S = 0.02
_SELF = "127.0.0.1"
_START_S = 2.0


class TransferState(Enum):
    """How one read stands."""

    RUNNING = 0
    DONE = 1
    FAILED = 2


class MooncakeEngine:
    """A running engine. Raises TransportUnavailable kinds when it cannot start. Not usable after fork().

    `host` is the address that peers use; the engine listens on every interface whatever it says. Only
    hosts that its `packet_filter` lets in reach it. Between the engine's own start and the filter's, about a
    millisecond, everybody does: there is no memory to be read or written then, but a malformed message
    that arrives in it ends the process.
    """

    def __init__(self, host: str, protocol: WireProtocol, devices: str = "") -> None:
        self.protocol = protocol
        self._native: NativeEngine | None = start_engine(protocol, host, devices)
        self._registered: list[int] = []
        port = self._native.get_rpc_port()
        self.session = f"{host}:{port}"
        self.packet_filter = PacketFilter()
        try:
            self._install_filter(port)
        except RforkError:
            self.close()
            raise

    def _install_filter(self, port: int) -> None:
        """Shut both ports, but for the one visit that tells which the other is.

        Taking an engine down waits for its thread in accept() *while it holds the interpreter lock*, a
        second in which a serving process would stand still: so that is made to wake more often. The
        accept() under way keeps the time limit it began with, unless somebody comes: this visit.
        """
        self.packet_filter.allow("self", _SELF)
        self.packet_filter.add(port, _ACCEPT_S)
        if self.protocol == "tcp":
            self.packet_filter.add(_data_port(port))
        else:
            ping_handshake_port(f"{_SELF}:{port}", time.monotonic() + _START_S)
        self.packet_filter.deny("self")

    def register(self, areas: Sequence[Region]) -> None:
        """Make (address, length) areas readable and writable for peers. Raises TransportUnavailable."""
        if not areas:
            return
        addresses, lengths = [address for address, _ in areas], [length for _, length in areas]
        status = self._running().batch_register_memory(addresses, lengths)
        if status != 0:
            raise TransportUnavailable(
                f"transfer_engine could not register {len(areas)} memory areas (status {status})",
                hint="raise the locked-memory limit (ulimit -l unlimited); rfork doctor says more",
            )
        self._registered.extend(addresses)

    def start_read(self, session: str, local: int, remote: int, length: int) -> int:
        """Start one read; its number. Always a batch of one, so that its state is that of all its bytes.

        Raises SourceUnavailable when the engine refuses it. The first read of a session does the
        handshake, which a stopped peer can hold up for 60 s.
        """
        batch = self._running().batch_transfer_async_read(session, [local], [remote], [length])
        if batch == 0:
            raise SourceUnavailable(f"transfer_engine has no way to {session}")
        return batch

    def state(self, read: int) -> TransferState:
        """How a started read stands; after DONE or FAILED its number is void and must not be used again."""
        status = self._running().transfer_check_status(read)
        if status == 1:
            return TransferState.DONE
        # -2 ("late") is not an end: bytes may still land.
        return TransferState.FAILED if status == -1 else TransferState.RUNNING

    def close(self) -> None:
        """Take the engine down; once it returns no byte moves, reads under way included.

        The caller sees to it that no other thread is inside a call. Safe to call twice.
        """
        native, self._native = self._native, None
        self.packet_filter.close()
        if native is not None and self._registered:
            # It goes away with the engine if this fails.
            native.batch_unregister_memory(self._registered)
            self._registered = []
        # The last reference: the library joins its threads here.
        del native

    def _running(self) -> NativeEngine:
        if self._native is None:
            raise SourceUnavailable("this transfer_engine is closed")
        return self._native


def ping_handshake_port(session: str, deadline: float, timeout_s: float = 2.0) -> None:
    """Ask the handshake port of `session` for a sign of life, without any engine.

    Raises SourceUnavailable when nobody listens there, SourceTimeout when nobody answers within
    `timeout_s` seconds or by `deadline`.
    """
    host, _, port = session.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SourceUnavailable(f"{session!r} is not a transfer_engine session (host:port)")
    try:
        # An answer of any kind, even a hang-up, comes from a live handshake thread.
        _query_handshake_port(
            host, int(port), _PROBE, max(min(timeout_s, deadline - time.monotonic()), 0.001), min_bytes=1
        )
    except TimeoutError as error:
        raise SourceTimeout(f"{session} does not answer transfer_engine's handshake") from error
    except OSError as error:
        raise SourceUnavailable(f"{session} is not reachable: {error}") from error


def _data_port(port: int) -> int:
    """The port that an engine of this process gives bytes at, as it tells at its handshake port."""
    try:
        metadata = json.loads(
            _query_handshake_port(_SELF, port, _METADATA, _START_S, min_bytes=_MAX_RESPONSE_BYTES)[9:]
        )
        return int(metadata["tcp_data_port"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TransportUnavailable(f"transfer_engine does not tell its data port: {error!r}") from error


def _query_handshake_port(host: str, port: int, message_type: int, timeout: float, *, min_bytes: int) -> bytes:
    """Send a handshake message with nothing in it; the answer, or its beginning of at least `min_bytes` bytes.

    In front of it come its length (8 bytes) and its kind. Raises TimeoutError or another OSError.
    """
    message = bytes([message_type]) + b"{}"
    response = b""
    with socket.create_connection((host, port), timeout=timeout) as connection:
        connection.sendall(struct.pack("<Q", len(message)) + message)
        while len(response) < min_bytes and (part := connection.recv(4096)):
            response += part
    return response
