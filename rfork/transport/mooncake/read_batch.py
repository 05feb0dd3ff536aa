"""The reads of one call: started while there is room, and waited for. Runs on the target."""

from __future__ import annotations

import ctypes
import time
from collections import deque

import torch

from rfork.errors import SourceError, SourceTimeout, SourceUnavailable
from rfork.transport.mooncake.engine import TransferState, ping_handshake_port
from rfork.transport.mooncake.read_plan import RemoteRead
from rfork.transport.mooncake.session import MIN_WAIT_S, TransferSession

MAX_INFLIGHT = 64

GRACE_S = 3.0
"""A read past its deadline gets this long to end: the engine fails one that makes no progress after 2 s."""

MAX_WAIT_S = 0.004

THROTTLE_POLL_S = 0.05
"""Longest wait for the rate's next bytes: it may have been raised meanwhile."""


class ReadBatch:
    """The reads of one call: started while there is room, looked at until all have ended."""

    def __init__(self, connection: TransferSession, planned: list[RemoteRead], deadline: float) -> None:
        self._connection = connection
        self._engine = connection.engine
        self._session = connection.session
        self._waiting = deque(planned)
        self._deadline = deadline
        self._flying: dict[int, tuple[RemoteRead, torch.Tensor | None]] = {}
        self._bytes = 0
        self._failed = False

    def finish(self) -> None:
        """Do all of them. Raises SourceUnavailable or SourceTimeout once none is under way any more."""
        wait = MIN_WAIT_S
        while self._waiting or self._flying:
            late = time.monotonic() >= self._deadline
            if self._failed or late:
                break
            wait_s = self._start()
            if self._poll():
                wait = MIN_WAIT_S
            elif self._connection.broken.wait(wait if self._flying else max(wait, min(wait_s, THROTTLE_POLL_S))):
                self._connection.check_open()
            else:
                wait = min(wait * 1.5, MAX_WAIT_S)
        if self._waiting or self._flying or self._failed:
            self._drain()
            raise self._reason()

    def _start(self) -> float:
        """Start what there is room for; the seconds until the rate lets the next one start."""
        while self._waiting and self._can_submit():
            staging = None
            if self._waiting[0].pieces:
                staging = self._connection.acquire_staging(wait_until=None if self._flying else self._deadline)
                if staging is None:
                    return 0.0
            request, left, wait_s = self._connection.consume(self._waiting[0])
            if wait_s > 0:
                self._release_staging(staging)
                return wait_s
            self._waiting.popleft()
            if left is not None:
                self._waiting.appendleft(left)
            # What is left of a staged request may be a single piece, which goes straight to its place.
            local = staging.data_ptr() if request.pieces and staging is not None else request.local
            if not request.pieces:
                self._release_staging(staging)
                staging = None
            try:
                number = self._engine.start_read(self._connection.session, local, request.remote, request.length)
            except SourceUnavailable:
                self._failed = True
                self._connection.record_completion(request.length)
                self._release_staging(staging)
                return 0.0
            self._flying[number] = (request, staging)
            self._bytes += request.length
        return 0.0

    def _release_staging(self, staging: torch.Tensor | None) -> None:
        if staging is not None:
            self._connection.release_staging(staging)

    def _can_submit(self) -> bool:
        return len(self._flying) < MAX_INFLIGHT and self._bytes < self._connection.sizes.in_flight

    def _poll(self) -> bool:
        """Take in what has ended; whether anything has."""
        ended = [
            (number, state)
            for number in self._flying
            if (state := self._engine.state(number)) is not TransferState.RUNNING
        ]
        for number, state in ended:
            request, staging = self._flying.pop(number)
            self._bytes -= request.length
            self._connection.record_completion(request.length)
            if state is TransferState.FAILED:
                self._failed = True
            elif staging is not None:
                _scatter(request, staging.data_ptr())
            self._release_staging(staging)
        return bool(ended)

    def _drain(self) -> None:
        """Wait until nothing is under way; take the engine down if that does not come by itself."""
        limit = time.monotonic() + GRACE_S
        while self._flying and time.monotonic() < limit:
            if not self._poll() and self._connection.broken.wait(MAX_WAIT_S):
                self._connection.check_open()
        if self._flying:
            self._connection.fail(SourceTimeout(f"{self._session} did not finish its reads in time"))

    def _reason(self) -> SourceError:
        """What to blame: the engine only says that a read failed, so the source is asked again."""
        try:
            ping_handshake_port(self._session, time.monotonic() + 2.0)
        except SourceError as error:
            return error
        if self._failed:
            return SourceUnavailable(f"{self._session} refused a read or broke it off")
        return SourceTimeout(f"{self._session} was not done by the deadline")


def _scatter(request: RemoteRead, staging: int) -> None:
    for piece in request.pieces:
        ctypes.memmove(piece.local, staging + piece.remote - request.remote, piece.length)
