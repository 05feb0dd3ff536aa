"""Executes the reads of one call, within the limits of the session. Runs on the target."""

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
"""Time that unfinished reads get after the deadline: the engine fails a read without progress after 2 s."""

MAX_WAIT_S = 0.004

THROTTLE_POLL_S = 0.05
"""Maximum wait for the rate limit, because the limit may be raised in the meantime."""


class ReadBatch:
    """The reads of one call: started as capacity allows, and polled until all have finished."""

    def __init__(self, transfer_session: TransferSession, reads: list[RemoteRead], deadline: float) -> None:
        self._transfer_session = transfer_session
        self._engine = transfer_session.engine
        self._session = transfer_session.session
        self._waiting = deque(reads)
        self._deadline = deadline
        self._in_flight: dict[int, tuple[RemoteRead, torch.Tensor | None]] = {}
        self._bytes = 0
        self._failed = False

    def finish(self) -> None:
        """Execute all reads. Raises SourceUnavailable or SourceTimeout once none is in flight any more."""
        wait = MIN_WAIT_S
        while self._waiting or self._in_flight:
            timed_out = time.monotonic() >= self._deadline
            if self._failed or timed_out:
                break
            wait_s = self._start()
            if self._poll():
                wait = MIN_WAIT_S
            elif self._transfer_session.broken.wait(
                wait if self._in_flight else max(wait, min(wait_s, THROTTLE_POLL_S))
            ):
                self._transfer_session.check_open()
            else:
                wait = min(wait * 1.5, MAX_WAIT_S)
        if self._waiting or self._in_flight or self._failed:
            self._drain()
            raise self._failure()

    def _start(self) -> float:
        """Start as many reads as capacity allows; return the seconds until the rate limit allows the next
        one.
        """
        while self._waiting and self._can_submit():
            staging = None
            if self._waiting[0].pieces:
                staging = self._transfer_session.acquire_staging(wait_until=None if self._in_flight else self._deadline)
                if staging is None:
                    return 0.0
            request, rest, wait_s = self._transfer_session.consume(self._waiting[0])
            if wait_s > 0:
                self._release_staging(staging)
                return wait_s
            self._waiting.popleft()
            if rest is not None:
                self._waiting.appendleft(rest)
            # The rest of a split staged request may be a single piece, which is read directly to its
            # destination.
            local = staging.data_ptr() if request.pieces and staging is not None else request.local
            if not request.pieces:
                self._release_staging(staging)
                staging = None
            try:
                number = self._engine.start_read(self._transfer_session.session, local, request.remote, request.length)
            except SourceUnavailable:
                self._failed = True
                self._transfer_session.record_completion(request.length)
                self._release_staging(staging)
                return 0.0
            self._in_flight[number] = (request, staging)
            self._bytes += request.length
        return 0.0

    def _release_staging(self, staging: torch.Tensor | None) -> None:
        if staging is not None:
            self._transfer_session.release_staging(staging)

    def _can_submit(self) -> bool:
        return len(self._in_flight) < MAX_INFLIGHT and self._bytes < self._transfer_session.sizes.in_flight

    def _poll(self) -> bool:
        """Process finished reads; return True if there were any."""
        finished = [
            (number, state)
            for number in self._in_flight
            if (state := self._engine.state(number)) is not TransferState.RUNNING
        ]
        for number, state in finished:
            request, staging = self._in_flight.pop(number)
            self._bytes -= request.length
            self._transfer_session.record_completion(request.length)
            if state is TransferState.FAILED:
                self._failed = True
            elif staging is not None:
                _scatter(request, staging.data_ptr())
            self._release_staging(staging)
        return bool(finished)

    def _drain(self) -> None:
        """Wait until no read is in flight; close the engine if that takes too long."""
        expires_at = time.monotonic() + GRACE_S
        while self._in_flight and time.monotonic() < expires_at:
            if not self._poll() and self._transfer_session.broken.wait(MAX_WAIT_S):
                self._transfer_session.check_open()
        if self._in_flight:
            self._transfer_session.fail(SourceTimeout(f"{self._session} did not finish its reads in time"))

    def _failure(self) -> SourceError:
        """Return the error to raise. The engine reports no cause, so ping the source."""
        try:
            ping_handshake_port(self._session, time.monotonic() + 2.0)
        except SourceError as error:
            return error
        if self._failed:
            return SourceUnavailable(f"{self._session} rejected or aborted a read")
        return SourceTimeout(f"{self._session} did not finish before the deadline")


def _scatter(request: RemoteRead, staging: int) -> None:
    for piece in request.pieces:
        ctypes.memmove(piece.local, staging + piece.remote - request.remote, piece.length)
