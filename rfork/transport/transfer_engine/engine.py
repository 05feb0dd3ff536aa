"""One Mooncake engine, made safe to hold: typed, never called before it runs, quick to take down.

Both sides have one. Creating it takes about 1 ms and two threads, so each source and each reader gets
its own: a silent peer blocks only the engine that spoke to it, and a source that restarted on the
same port is not mistaken for its predecessor.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from enum import Enum
from typing import Literal

import torch

from rfork.errors import RforkError, SettingsError, SourceGone, SourceStalled
from rfork.transport.transfer_engine.library import NativeEngine, new_engine

Protocol = Literal["rdma", "tcp"]

_PROBE = b"\x03{}"
"""Mooncake's handshake message "probe" (type 3) with an empty JSON object: answered, and else ignored."""

_ACCEPT_TIMEOUT = struct.pack("ll", 0, 20_000)
"""20 ms as a `struct timeval`."""


class TransferState(Enum):
    """How one read stands."""

    RUNNING = 0
    DONE = 1
    FAILED = 2


class Engine:
    """A running engine. Raises SettingsError when `protocol` cannot start here. Not usable after fork().

    `host` is the address that peers use; the engine listens on every interface whatever it says.
    """

    def __init__(self, host: str, protocol: Protocol, devices: str = "") -> None:
        self.protocol = protocol
        native = new_engine()
        if native.initialize(host, "P2PHANDSHAKE", protocol, devices) != 0:
            raise SettingsError(
                f"transfer_engine could not start over {protocol} at {host}",
                hint="run with MC_LOG_LEVEL=INFO to see why; check RFORK_ADVERTISE and RFORK_RDMA_DEVICES",
            )
        self._native: NativeEngine | None = native
        self._registered: list[int] = []
        self.session = f"{host}:{native.get_rpc_port()}"
        _shorten_accept(native.get_rpc_port())
        # The accept() under way keeps the time limit it began with, unless somebody comes: so come.
        probe(f"127.0.0.1:{native.get_rpc_port()}", time.monotonic() + 2.0)

    def register(self, areas: Sequence[tuple[int, int]]) -> None:
        """Make (address, length) areas readable and writable for peers. Raises SettingsError."""
        if not areas:
            return
        addresses, lengths = [address for address, _ in areas], [length for _, length in areas]
        status = self._running().batch_register_memory(addresses, lengths)
        if status != 0:
            raise SettingsError(
                f"transfer_engine could not register {len(areas)} memory areas (status {status})",
                hint="over RDMA, raise the locked-memory limit (ulimit -l unlimited); see rfork doctor",
            )
        self._registered.extend(addresses)

    def start_read(self, session: str, local: int, remote: int, length: int) -> int:
        """Start one read; its number. Always a batch of one, so that its state is that of all its bytes.

        Raises SourceGone when the engine refuses it. The first read of a session does the
        handshake, which a stopped peer can hold up for 60 s.
        """
        batch = self._running().batch_transfer_async_read(session, [local], [remote], [length])
        if batch == 0:
            raise SourceGone(f"transfer_engine has no way to {session}")
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
        if native is not None and self._registered:
            # It goes away with the engine if this fails.
            native.batch_unregister_memory(self._registered)
            self._registered = []
        # The last reference: the library joins its threads here.
        del native

    def _running(self) -> NativeEngine:
        if self._native is None:
            raise SourceGone("this transfer_engine is closed")
        return self._native


def connect_engine(
    session: str, remote: int, protocol: Protocol, host: str, devices: str, deadline: float
) -> Engine:
    """Target side: an engine that did its handshake with `session`, shown by reading the byte at `remote`.

    Raises SourceGone or SourceStalled by `deadline` (`time.monotonic()`). A handshake cannot be
    broken off, so one that hangs is left to a thread of its own, which takes its engine down later.
    """
    probe(session, deadline)
    engine = Engine(host, protocol, devices)
    outcome: list[TransferState | RforkError] = []
    decided = threading.Condition()
    abandoned = False

    def handshake() -> None:
        # Goes to memory of the thread's own, so that a late byte does no harm.
        scratch = torch.zeros(4096, dtype=torch.uint8)
        try:
            if protocol == "rdma":
                engine.register([(scratch.data_ptr(), scratch.numel())])
            read = engine.start_read(session, scratch.data_ptr(), remote, 1)
            wait = threading.Event()
            while (state := engine.state(read)) is TransferState.RUNNING:
                wait.wait(0.0005)
            result: TransferState | RforkError = state
        except RforkError as error:
            result = error
        with decided:
            outcome.append(result)
            decided.notify()
            if abandoned:
                engine.close()
        return

    threading.Thread(target=handshake, name="rfork-handshake", daemon=True).start()
    with decided:
        if not decided.wait_for(lambda: outcome, max(deadline - time.monotonic(), 0)):
            abandoned = True
            raise SourceStalled(f"{session} did not finish the transfer_engine handshake in time")
    if outcome[0] is TransferState.DONE:
        return engine
    engine.close()
    if isinstance(outcome[0], RforkError):
        raise outcome[0]
    raise SourceGone(f"{session} refused the first read over transfer_engine")


def probe(session: str, deadline: float, patience_s: float = 2.0) -> None:
    """Ask the handshake port of `session` for a sign of life, without any engine.

    Raises SourceGone when nobody listens there, SourceStalled when nobody answers within
    `patience_s` seconds or by `deadline`.
    """
    host, _, port = session.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SourceGone(f"{session!r} is not a transfer_engine session (host:port)")
    limit = max(min(patience_s, deadline - time.monotonic()), 0.001)
    try:
        with socket.create_connection((host, int(port)), timeout=limit) as connection:
            connection.sendall(struct.pack("<Q", len(_PROBE)) + _PROBE)
            # An answer of any kind, even a hang-up, comes from a live handshake thread.
            connection.recv(4096)
    except TimeoutError as error:
        raise SourceStalled(f"{session} does not answer transfer_engine's handshake") from error
    except OSError as error:
        raise SourceGone(f"{session} is not reachable: {error}") from error


def _shorten_accept(port: int) -> None:
    """Let the engine's listener wake every 20 ms instead of every second.

    Taking an engine down waits for that thread *while it holds the interpreter lock*: a second in
    which a serving process would stand still.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as listener:
                if _listens_on(listener, port):
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _ACCEPT_TIMEOUT)
        except OSError:
            continue  # closed by another thread meanwhile, so not the listener


def _listens_on(candidate: socket.socket, port: int) -> bool:
    if candidate.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(listens) and candidate.getsockname()[1] == port
