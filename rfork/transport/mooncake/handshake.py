"""How a target comes by its engine: the handshake with the source, and its own memory registered meanwhile.

Neither can be broken off once it has begun, so each has a thread of its own: what takes too long is left to
it, and the engine is taken down when the last of them has ended. Runs on the target.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import torch

from rfork.errors import RforkError, SourceTimeout, SourceUnavailable, TargetError, TransportUnavailable
from rfork.transport.mooncake.engine import MooncakeEngine, TransferState, ping_handshake_port
from rfork.transport.mooncake.library import WireProtocol

HANDSHAKE = "handshake"


def connect_engine(
    session: str,
    remote: int,
    protocol: WireProtocol,
    host: str,
    devices: str,
    deadline: float,
    register: Callable[[MooncakeEngine], None] | None = None,
) -> MooncakeEngine:
    """Target side: an engine that did its handshake with `session`, shown by reading the byte at `remote`.

    `register` is called with the engine beside that, and whatever it raises is raised here.
    Raises SourceUnavailable or SourceTimeout by `deadline` (`time.monotonic()`), TransportUnavailable kinds where
    the engine does not start or is not done with the memory by then, or TargetError for what else fails on
    this side.
    """
    ping_handshake_port(session, deadline)
    opening = EngineHandshake(MooncakeEngine(host, protocol, devices), session)
    opening.begin(HANDSHAKE, lambda engine: _shake_hands(engine, session, remote))
    if register is not None:
        opening.begin("register", register)
    return opening.finish(deadline)


class EngineHandshake:
    """An engine and the threads that are inside it; once given up, the last of them takes it down."""

    def __init__(self, engine: MooncakeEngine, session: str) -> None:
        self._engine = engine
        self._session = session
        self._changed = threading.Condition()
        self._running: set[str] = set()
        self._error: RforkError | None = None
        self._abandoned = False

    def begin(self, name: str, step: Callable[[MooncakeEngine], None]) -> None:
        """Do `step` on a thread of its own. Raises TargetError where there can be none."""
        with self._changed:
            self._running.add(name)
        try:
            threading.Thread(target=self._run, args=(name, step), name=f"rfork-{name}", daemon=True).start()
        except RuntimeError as error:
            self._ended(name, None)
            self._abandon()
            raise TargetError(f"no thread for transfer_engine's {name}: {error}") from error

    def finish(self, deadline: float) -> MooncakeEngine:
        """The engine, when all steps are done by the deadline; else what went wrong first is raised."""
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
                "transfer_engine took too long to register this side's memory",
                hint="raise RFORK_SOURCE_IDLE_TIMEOUT_S, or use RFORK_TRANSPORTS=http",
            )
        return None

    def _run(self, name: str, step: Callable[[MooncakeEngine], None]) -> None:
        failed: RforkError | None = None
        try:
            step(self._engine)
        except RforkError as error:
            failed = error
        except Exception as error:  # out of memory, or a bug: the source is not to blame for it
            failed = TargetError(f"{type(error).__name__} before the first read of {self._session}: {error}")
        self._ended(name, failed)

    def _ended(self, name: str, error: RforkError | None) -> None:
        with self._changed:
            self._running.discard(name)
            self._error = self._error or error
            last = self._abandoned and not self._running
            self._changed.notify_all()
        if last:
            self._engine.close()

    def _abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            idle = not self._running
        if idle:
            self._engine.close()


def _shake_hands(engine: MooncakeEngine, session: str, remote: int) -> None:
    """Read one byte: the first read of a session does the handshake. Raises SourceUnavailable."""
    # Goes to memory of the thread's own, so that a late byte does no harm.
    scratch = torch.zeros(4096, dtype=torch.uint8)
    if engine.protocol == "rdma":
        # The source asks back for the description of this side. Over TCP nobody comes here.
        _allow_source(engine, session)
        engine.register([(scratch.data_ptr(), scratch.numel())])
    read = engine.start_read(session, scratch.data_ptr(), remote, 1)
    wait = threading.Event()
    while (state := engine.state(read)) is TransferState.RUNNING:
        wait.wait(0.0005)
    if state is not TransferState.DONE:
        raise SourceUnavailable(f"{session} refused the first read over transfer_engine")


def _allow_source(engine: MooncakeEngine, session: str) -> None:
    """Raises SourceUnavailable when the session's host has no address."""
    host, _, port = session.rpartition(":")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise SourceUnavailable(f"{session} is not reachable: {error}") from error
    for address in {str(address[0]) for *_, address in found}:
        engine.packet_filter.allow(f"source at {address}", address)
