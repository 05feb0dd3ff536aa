"""The governor: holds what this instance gives under a rate, whoever reads.

Runs on the source. The rate holds for the instance and not for each reader: it is the lower one of the fixed
cap and of what the latency guard allows now. Exporters that send each byte spend from one budget, in turns;
readers on one-sided transports keep to their part by themselves (`rfork.source.rate_advisor`), and the budget is
the smaller by that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rfork.source.latency_controller import LatencyController
from rfork.transport.token_bucket import SLICE_S, TokenBucket

MIN_GRANT = 16 << 10
"""Bytes in one grant at least, unless less is asked for: smaller ones cost more than they carry."""
MAX_GRANT = 2 << 20
"""Bytes in one grant under a rate: what is granted goes out however low the next rate is."""
POLL_INTERVAL_S = 0.05
"""Who waits looks again this often: the rate may have changed."""


class EgressLimiter:
    """The budget of one instance. `cap` is in bytes a second; None: only `latency` limits, if it is given.

    Without any limit everything passes. `part` says how much of the rate is granted here, above 0 and at
    most 1: the rest is for those who ask for no grant.
    """

    def __init__(
        self,
        cap: int | None,
        latency: LatencyController | None = None,
        *,
        part: Callable[[], float] = lambda: 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cap = cap
        self._latency = latency
        self._part = part
        self._bucket = TokenBucket(clock=clock)
        self._lock = threading.Lock()
        self._turn_active = False  # somebody has the turn: it waits for the budget, the others for it
        self._waiters: dict[str, deque[threading.Event]] = {}  # by fork, the next one first; none is empty
        self._closed = threading.Event()

    def rate(self, *, active: bool) -> int | None:
        """Bytes a second that may be given now; `active`: somebody takes them. None: no limit."""
        return self._recompute(self._latency.rate(active=active) if self._latency is not None else None)

    @property
    def current_limit(self) -> int | None:
        """What those who read now are held to, for the planner; the fixed cap while nobody reads."""
        return self._recompute(self._latency.current_limit() if self._latency is not None else None)

    def grant(self, max_bytes: int, fork_id: str) -> int:
        """Block until some of `max_bytes` bytes may be sent, or the governor is closed; returns how many.

        Forks that wait have one grant each in turn, however many connections ask for one of them. Under a
        rate that is a fiftieth of a second's worth: short for the work that goes on beside it, and with many
        readers each is served often enough not to count the source as stalled.
        """
        if self.rate(active=True) is None:
            return max_bytes
        with self._next_waiter(fork_id):
            while True:
                rate = self._granted_rate()
                self._bucket.set_rate(rate)
                granted = max_bytes if rate is None else _slice(rate, max_bytes)
                delay = self._bucket.consume(granted)
                if delay <= 0 or self._closed.wait(min(delay, POLL_INTERVAL_S)):
                    return granted

    def close(self) -> None:
        """Wake everyone who waits."""
        self._closed.set()

    def _granted_rate(self) -> int | None:
        rate = self.rate(active=True)
        return None if rate is None else max(1, int(rate * self._part()))

    @contextmanager
    def _next_waiter(self, fork_id: str) -> Iterator[None]:
        """Strictly in order: with a plain lock, one that asks again at once would keep the others out."""
        turn = threading.Event()
        with self._lock:
            self._waiters.setdefault(fork_id, deque()).append(turn)
            if not self._turn_active:
                self._wake_next()
        turn.wait()
        try:
            yield
        finally:
            with self._lock:
                # Behind all that came while it had its turn: then one connection gets as much as many.
                if fork_id in self._waiters:
                    self._waiters[fork_id] = self._waiters.pop(fork_id)
                self._wake_next()

    def _wake_next(self) -> None:
        """Give the turn to the first in the line of the next fork, if anybody waits. Under the lock."""
        self._turn_active = bool(self._waiters)
        if self._turn_active:
            fork_id, line = next(iter(self._waiters.items()))
            line.popleft().set()
            if not line:
                del self._waiters[fork_id]

    def _recompute(self, rate: int | None) -> int | None:
        if self._cap is None or rate is None:
            return self._cap if rate is None else rate
        return min(self._cap, rate)


def _slice(rate: int, max_bytes: int) -> int:
    return min(max_bytes, MAX_GRANT, max(MIN_GRANT, int(rate * SLICE_S)))
