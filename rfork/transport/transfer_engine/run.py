"""The reads of one call: started while there is room, and waited for. Runs on the target."""

from __future__ import annotations

import ctypes
import time
from collections import deque

import torch

from rfork.errors import SourceError, SourceGone, SourceStalled
from rfork.transport.transfer_engine.connection import SHORTEST_WAIT_S, Connection
from rfork.transport.transfer_engine.engine import TransferState, probe
from rfork.transport.transfer_engine.plan import Request

MOST_READS_IN_FLIGHT = 64

GRACE_S = 3.0
"""A read past its deadline gets this long to end: the engine fails one that makes no progress after 2 s."""

LONGEST_WAIT_S = 0.004

HOLD_S = 0.05
"""Longest wait for the rate's next bytes: it may have been raised meanwhile."""


class Run:
    """The reads of one call: started while there is room, looked at until all have ended."""

    def __init__(self, connection: Connection, planned: list[Request], deadline: float) -> None:
        self._connection = connection
        self._engine = connection.engine
        self._session = connection.session
        self._waiting = deque(planned)
        self._deadline = deadline
        self._flying: dict[int, tuple[Request, torch.Tensor | None]] = {}
        self._bytes = 0
        self._failed = False

    def finish(self) -> None:
        """Do all of them. Raises SourceGone or SourceStalled once none is under way any more."""
        wait = SHORTEST_WAIT_S
        while self._waiting or self._flying:
            late = time.monotonic() >= self._deadline
            if self._failed or late:
                break
            held = self._start()
            if self._look():
                wait = SHORTEST_WAIT_S
            elif self._connection.broken.wait(wait if self._flying else max(wait, min(held, HOLD_S))):
                self._connection.raise_if_spent()
            else:
                wait = min(wait * 1.5, LONGEST_WAIT_S)
        if self._waiting or self._flying or self._failed:
            self._drain()
            raise self._reason()

    def _start(self) -> float:
        """Start what there is room for; the seconds until the rate lets the next one start."""
        while self._waiting and self._has_room():
            staging = None
            if self._waiting[0].pieces:
                staging = self._connection.take_staging(wait_until=None if self._flying else self._deadline)
                if staging is None:
                    return 0.0
            request, left, held = self._connection.spend(self._waiting[0])
            if held > 0:
                self._give_back(staging)
                return held
            self._waiting.popleft()
            if left is not None:
                self._waiting.appendleft(left)
            # What is left of a staged request may be a single piece, which goes straight to its place.
            local = staging.data_ptr() if request.pieces and staging is not None else request.local
            if not request.pieces:
                self._give_back(staging)
                staging = None
            try:
                number = self._engine.start_read(
                    self._connection.session, local, request.remote, request.length
                )
            except SourceGone:
                self._failed = True
                self._connection.landed(request.length)
                self._give_back(staging)
                return 0.0
            self._flying[number] = (request, staging)
            self._bytes += request.length
        return 0.0

    def _give_back(self, staging: torch.Tensor | None) -> None:
        if staging is not None:
            self._connection.give_staging(staging)

    def _has_room(self) -> bool:
        return len(self._flying) < MOST_READS_IN_FLIGHT and self._bytes < self._connection.sizes.in_flight

    def _look(self) -> bool:
        """Take in what has ended; whether anything has."""
        ended = [
            (number, state)
            for number in self._flying
            if (state := self._engine.state(number)) is not TransferState.RUNNING
        ]
        for number, state in ended:
            request, staging = self._flying.pop(number)
            self._bytes -= request.length
            self._connection.landed(request.length)
            if state is TransferState.FAILED:
                self._failed = True
            elif staging is not None:
                _scatter(request, staging.data_ptr())
            self._give_back(staging)
        return bool(ended)

    def _drain(self) -> None:
        """Wait until nothing is under way; take the engine down if that does not come by itself."""
        limit = time.monotonic() + GRACE_S
        while self._flying and time.monotonic() < limit:
            if not self._look() and self._connection.broken.wait(LONGEST_WAIT_S):
                self._connection.raise_if_spent()
        if self._flying:
            self._connection.give_up(SourceStalled(f"{self._session} did not finish its reads in time"))

    def _reason(self) -> SourceError:
        """What to blame: the engine only says that a read failed, so the source is asked again."""
        try:
            probe(self._session, time.monotonic() + 2.0)
        except SourceError as error:
            return error
        if self._failed:
            return SourceGone(f"{self._session} refused a read or broke it off")
        return SourceStalled(f"{self._session} was not done by the deadline")


def _scatter(request: Request, staging: int) -> None:
    for piece in request.pieces:
        ctypes.memmove(piece.local, staging + piece.remote - request.remote, piece.length)
