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

from rfork.errors import RforkError, SourceGone, SourceStalled, TargetError, TransportUnusable
from rfork.transport.transfer_engine.engine import Engine, TransferState, probe
from rfork.transport.transfer_engine.library import Wire

HANDSHAKE = "handshake"


def connect_engine(
    session: str,
    remote: int,
    protocol: Wire,
    host: str,
    devices: str,
    deadline: float,
    register: Callable[[Engine], None] | None = None,
) -> Engine:
    """Target side: an engine that did its handshake with `session`, shown by reading the byte at `remote`.

    `register` is called with the engine beside that, and whatever it raises is raised here.
    Raises SourceGone or SourceStalled by `deadline` (`time.monotonic()`), TransportUnusable kinds where
    the engine does not start or is not done with the memory by then, or TargetError for what else fails on
    this side.
    """
    probe(session, deadline)
    opening = _Opening(Engine(host, protocol, devices), session)
    opening.begin(HANDSHAKE, lambda engine: _shake_hands(engine, session, remote))
    if register is not None:
        opening.begin("register", register)
    return opening.finish(deadline)


class _Opening:
    """An engine and the threads that are inside it; once given up, the last of them takes it down."""

    def __init__(self, engine: Engine, session: str) -> None:
        self._engine = engine
        self._session = session
        self._changed = threading.Condition()
        self._running: set[str] = set()
        self._error: RforkError | None = None
        self._given_up = False

    def begin(self, name: str, step: Callable[[Engine], None]) -> None:
        """Do `step` on a thread of its own. Raises TargetError where there can be none."""
        with self._changed:
            self._running.add(name)
        try:
            threading.Thread(target=self._run, args=(name, step), name=f"rfork-{name}", daemon=True).start()
        except RuntimeError as error:
            self._ended(name, None)
            self._give_up()
            raise TargetError(f"no thread for transfer_engine's {name}: {error}") from error

    def finish(self, deadline: float) -> Engine:
        """The engine, when all steps are done by the deadline; else what went wrong first is raised."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or not self._running, max(deadline - time.monotonic(), 0)
            )
            error = self._error or self._late()
        if error is None:
            return self._engine
        self._give_up()
        raise error

    def _late(self) -> RforkError | None:
        if HANDSHAKE in self._running:
            return SourceStalled(f"{self._session} did not finish the transfer_engine handshake in time")
        if self._running:
            return TransportUnusable(
                "transfer_engine took too long to register this side's memory",
                hint="raise RFORK_STALL_S, or use RFORK_TRANSPORTS=http",
            )
        return None

    def _run(self, name: str, step: Callable[[Engine], None]) -> None:
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
            last = self._given_up and not self._running
            self._changed.notify_all()
        if last:
            self._engine.close()

    def _give_up(self) -> None:
        with self._changed:
            self._given_up = True
            idle = not self._running
        if idle:
            self._engine.close()


def _shake_hands(engine: Engine, session: str, remote: int) -> None:
    """Read one byte: the first read of a session does the handshake. Raises SourceGone."""
    # Goes to memory of the thread's own, so that a late byte does no harm.
    scratch = torch.zeros(4096, dtype=torch.uint8)
    if engine.protocol == "rdma":
        # The source asks back for the description of this side. Over TCP nobody comes here.
        _let_source_in(engine, session)
        engine.register([(scratch.data_ptr(), scratch.numel())])
    read = engine.start_read(session, scratch.data_ptr(), remote, 1)
    wait = threading.Event()
    while (state := engine.state(read)) is TransferState.RUNNING:
        wait.wait(0.0005)
    if state is not TransferState.DONE:
        raise SourceGone(f"{session} refused the first read over transfer_engine")


def _let_source_in(engine: Engine, session: str) -> None:
    """Raises SourceGone when the session's host has no address."""
    host, _, port = session.rpartition(":")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise SourceGone(f"{session} is not reachable: {error}") from error
    for address in {str(address[0]) for *_, address in found}:
        engine.packet_filter.let_in(f"source at {address}", address)
