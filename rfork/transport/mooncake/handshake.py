"""Prepares a target's engine: handshake with the source, concurrently with registering its own memory.

Neither step can be cancelled, so each runs on a separate thread. A step that takes too long is abandoned; the
last one to finish closes the engine. Runs on the target.
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
