"""Mooncake engines: typed wrapper, registration of memory, and the target's handshake with a source.

Both sides have one engine per source and per reader. Creating it takes about 1 ms and two threads: a silent peer
blocks only the engine that contacted it, and a source that restarted on the same port is not mistaken for its
predecessor. `MooncakeEngine` prevents calls before initialization and closes quickly.

The target registers its memory and does the handshake concurrently. Neither step can be cancelled, so each runs on
a separate thread. A step that takes too long is abandoned; the last one to finish closes the engine.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum

import torch

from rfork.errors import (
    GpuDirectUnavailable,
    RforkError,
    SourceTimeout,
    SourceUnavailable,
    TargetError,
    TransportUnavailable,
)
from rfork.image.memory import Image
from rfork.image.registration import Region, regions_to_register, uses_expandable_segments
from rfork.transport.bpf_filter import PacketFilter
from rfork.transport.mooncake.library import NativeEngine, WireProtocol, start_engine

MAX_DESCRIPTOR_BYTES = 1 << 20
"""Maximum size of the engine's handshake message, which lists all areas; if it is exceeded, every read fails."""
AREA_BYTES, KEY_BYTES = 104, 26
"""Bytes of one area in that message, and of the two keys that each network card has for it."""
HANDSHAKE = "handshake"
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


def regions_within_limit(image: Image, devices: int) -> list[Region]:
    """Return the areas that contain the image, for an engine with this many network cards (0 over TCP).

    Raises TransportUnavailable if there are too many.
    """
    regions, max_count = regions_to_register(image), MAX_DESCRIPTOR_BYTES // (AREA_BYTES + KEY_BYTES * devices)
    if len(regions) > max_count:
        raise TransportUnavailable(
            f"the image is in {len(regions)} memory areas; transfer_engine supports at most {max_count}",
            hint="use RFORK_TRANSPORTS=http, or load the model into fewer, larger allocations",
        )
    return regions


def register(engine: MooncakeEngine, image: Image, regions: Sequence[Region]) -> None:
    """Register the areas of `image`. Raises TransportUnavailable, for CUDA memory GpuDirectUnavailable."""
    try:
        engine.register(regions)
    except TransportUnavailable as error:
        if all(device.type != "cuda" for device in image.devices):
            raise
        hint = "see `rfork doctor` (GPUDirect, memlock)"
        if uses_expandable_segments(image):
            # Before its pull request 3538, Mooncake exports only the first segment of an expandable
            # allocation.
            hint = (
                "torch uses expandable segments: use a newer Mooncake, nvidia-peermem, or "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        raise GpuDirectUnavailable(str(error), hint=hint) from error


def connect_engine(
    session: str,
    remote: int,
    protocol: WireProtocol,
    host: str,
    devices: str,
    deadline: float,
    register: Callable[[MooncakeEngine], None] | None = None,
) -> MooncakeEngine:
    """Target side: return an engine that has completed the handshake with `session`, by reading the byte at
    `remote`.

    `register` is called with the engine concurrently, and its errors are raised here.

    Raises SourceUnavailable or SourceTimeout by `deadline` (`time.monotonic()`), TransportUnavailable or a
    subclass if the engine does not start or does not register the memory by then, or TargetError for other
    failures on this side.
    """
    ping_handshake_port(session, deadline)
    handshake = EngineHandshake(MooncakeEngine(host, protocol, devices), session)
    handshake.begin(HANDSHAKE, lambda engine: _perform_handshake(engine, session, remote))
    if register is not None:
        handshake.begin("register", register)
    return handshake.finish(deadline)


class EngineHandshake:
    """An engine and the threads that use it; once abandoned, the last thread closes it."""

    def __init__(self, engine: MooncakeEngine, session: str) -> None:
        self._engine = engine
        self._session = session
        self._changed = threading.Condition()
        self._running: set[str] = set()
        self._error: RforkError | None = None
        self._abandoned = False

    def begin(self, name: str, step: Callable[[MooncakeEngine], None]) -> None:
        """Run `step` on a separate thread. Raises TargetError if the thread cannot be started."""
        with self._changed:
            self._running.add(name)
        try:
            threading.Thread(target=self._run, args=(name, step), name=f"rfork-{name}", daemon=True).start()
        except RuntimeError as error:
            self._on_step_finished(name, None)
            self._abandon()
            raise TargetError(f"cannot start a thread for transfer_engine's {name}: {error}") from error

    def finish(self, deadline: float) -> MooncakeEngine:
        """Return the engine once all steps have finished; raise the first error, or a timeout at the
        deadline.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or not self._running, max(deadline - time.monotonic(), 0)
            )
            error = self._error or self._timed_out()
        if error is None:
            return self._engine
        self._abandon()
        raise error

    def _timed_out(self) -> RforkError | None:
        if HANDSHAKE in self._running:
            return SourceTimeout(f"{self._session} did not finish the transfer_engine handshake in time")
        if self._running:
            return TransportUnavailable(
                "transfer_engine did not register the target's memory in time",
                hint="raise RFORK_SOURCE_IDLE_TIMEOUT_S, or use RFORK_TRANSPORTS=http",
            )
        return None

    def _run(self, name: str, step: Callable[[MooncakeEngine], None]) -> None:
        failure: RforkError | None = None
        try:
            step(self._engine)
        except RforkError as error:
            failure = error
        except Exception as error:  # out of memory, or a bug: not the source's fault
            failure = TargetError(f"{type(error).__name__} before the first read of {self._session}: {error}")
        self._on_step_finished(name, failure)

    def _on_step_finished(self, name: str, error: RforkError | None) -> None:
        with self._changed:
            self._running.discard(name)
            self._error = self._error or error
            is_last = self._abandoned and not self._running
            self._changed.notify_all()
        if is_last:
            self._engine.close()

    def _abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            idle = not self._running
        if idle:
            self._engine.close()


def _perform_handshake(engine: MooncakeEngine, session: str, remote: int) -> None:
    """Read one byte: the first read of a session does the handshake. Raises SourceUnavailable."""
    # Read into memory of this thread, so that a late byte does no harm.
    scratch = torch.zeros(4096, dtype=torch.uint8)
    if engine.protocol == "rdma":
        # The source connects back to request our segment description. Over TCP it does not.
        _allow_source(engine, session)
        engine.register([(scratch.data_ptr(), scratch.numel())])
    read = engine.start_read(session, scratch.data_ptr(), remote, 1)
    wait = threading.Event()
    while (state := engine.state(read)) is TransferState.RUNNING:
        wait.wait(0.0005)
    if state is not TransferState.DONE:
        raise SourceUnavailable(f"{session} rejected the first read over transfer_engine")


def _allow_source(engine: MooncakeEngine, session: str) -> None:
    """Allow the session's host to connect. Raises SourceUnavailable if it does not resolve."""
    host, _, port = session.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise SourceUnavailable(f"{session} is not reachable: {error}") from error
    for address in {str(address[0]) for *_, address in addresses}:
        engine.packet_filter.allow(f"source at {address}", address)
