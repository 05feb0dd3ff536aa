"""Typed wrapper of one Mooncake engine that prevents calls before initialization and closes quickly.

Both sides have one. Creating it takes about 1 ms and two threads, so each source and each reader has its own:
a silent peer blocks only the engine that contacted it, and a source that restarted on the same port is not
mistaken for its predecessor.
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
"""Types of Mooncake's handshake messages: request the segment description, and ping."""
_MAX_RESPONSE_BYTES = 1 << 20
_ACCEPT_S = 0.02
_SELF = "127.0.0.1"
_START_S = 2.0


class TransferState(Enum):
    """State of one read."""

    RUNNING = 0
    DONE = 1
    FAILED = 2


class MooncakeEngine:
    """A running engine. Raises TransportUnavailable or a subclass if it cannot start. Not usable after
    fork().

    `host` is the address that peers use; the engine listens on every interface regardless. Only hosts that
    its `packet_filter` allows can connect. In the millisecond between the start of the engine and of the
    filter, any client can: no memory is registered then, but a malformed message ends the process.
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
        """Filter both ports, except for one connection of our own, which reveals the other port.

        Closing an engine waits for its accept() thread *while holding the interpreter lock*: up to a second
        in which a serving process would stop. So accept() gets a short timeout. An accept() that is already
        blocked keeps its old timeout until a client connects: our connection ends it.
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
                hint="raise the locked-memory limit (ulimit -l unlimited); see `rfork doctor`",
            )
        self._registered.extend(addresses)

    def start_read(self, session: str, local: int, remote: int, length: int) -> int:
        """Start one read and return its number. Always a batch of one, so that its state covers all its
        bytes.

        Raises SourceUnavailable if the engine rejects it. The first read of a session does the handshake,
        which an unresponsive peer can delay by 60 s.
        """
        batch = self._running().batch_transfer_async_read(session, [local], [remote], [length])
        if batch == 0:
            raise SourceUnavailable(f"transfer_engine cannot reach {session}")
        return batch

    def state(self, read: int) -> TransferState:
        """Return the state of a read. After DONE or FAILED the number is invalid and must not be used again."""
        status = self._running().transfer_check_status(read)
        if status == 1:
            return TransferState.DONE
        # -2 ("late") is not final: bytes may still arrive.
        return TransferState.FAILED if status == -1 else TransferState.RUNNING

    def close(self) -> None:
        """Close the engine. When this returns, no more bytes are transferred, even by unfinished reads.

        The caller ensures that no other thread is inside a call. Idempotent.
        """
        native, self._native = self._native, None
        self.packet_filter.close()
        if native is not None and self._registered:
            # If this fails, closing the engine unregisters the memory.
            native.batch_unregister_memory(self._registered)
            self._registered = []
        # The last reference: its destructor joins the engine's threads.
        del native

    def _running(self) -> NativeEngine:
        if self._native is None:
            raise SourceUnavailable("the transfer_engine is closed")
        return self._native


def ping_handshake_port(session: str, deadline: float, timeout_s: float = 2.0) -> None:
    """Ping the handshake port of `session`, without an engine.

    Raises SourceUnavailable if the connection fails, SourceTimeout if there is no reply within `timeout_s`
    seconds or by `deadline`.
    """
    host, _, port = session.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SourceUnavailable(f"{session!r} is not a transfer_engine session (host:port)")
    try:
        # Any reply, even a closed connection, comes from a live handshake thread.
        _query_handshake_port(
            host, int(port), _PROBE, max(min(timeout_s, deadline - time.monotonic()), 0.001), min_bytes=1
        )
    except TimeoutError as error:
        raise SourceTimeout(f"{session} did not reply to transfer_engine's handshake") from error
    except OSError as error:
        raise SourceUnavailable(f"{session} is not reachable: {error}") from error


def _data_port(port: int) -> int:
    """Return the TCP data port of an engine of this process, as reported by its handshake port."""
    try:
        metadata = json.loads(
            _query_handshake_port(_SELF, port, _METADATA, _START_S, min_bytes=_MAX_RESPONSE_BYTES)[9:]
        )
        return int(metadata["tcp_data_port"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TransportUnavailable(f"transfer_engine does not report its data port: {error!r}") from error


def _query_handshake_port(host: str, port: int, message_type: int, timeout: float, *, min_bytes: int) -> bytes:
    """Send an empty handshake message; return the reply, or at least its first `min_bytes` bytes.

    The reply starts with its length (8 bytes) and its type. Raises TimeoutError or another OSError.
    """
    message = bytes([message_type]) + b"{}"
    response = b""
    with socket.create_connection((host, port), timeout=timeout) as connection:
        connection.sendall(struct.pack("<Q", len(message)) + message)
        while len(response) < min_bytes and (part := connection.recv(4096)):
            response += part
    return response
