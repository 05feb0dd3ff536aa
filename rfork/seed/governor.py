"""The governor: holds what this instance gives under a rate, whoever reads.

Runs on the source. Every exporter spends from one budget, so the rate holds for the instance and not
for each reader. It is the lower one of the fixed cap and of what the latency guard allows now.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rfork.seed.latency import LatencyGuard
from rfork.transport.bucket import SLICE_S, Bucket

LEAST_GRANT = 16 << 10
"""Bytes in one grant at least, unless less is asked for: smaller ones cost more than they carry."""
MOST_GRANT = 2 << 20
"""Bytes in one grant under a rate: what is granted goes out however low the next rate is."""
LOOK_S = 0.05
"""Who waits looks again this often: the rate may have changed."""


class Governor:
    """The budget of one instance. `cap` is in bytes a second; None: only `latency` limits, if it is given.

    Without any limit everything passes.
    """

    def __init__(
        self,
        cap: int | None,
        latency: LatencyGuard | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cap = cap
        self._latency = latency
        self._bucket = Bucket(clock=clock)
        self._lock = threading.Lock()
        self._line: deque[threading.Event] = (
            deque()
        )  # the first one waits for the budget, the others for their turn
        self._closed = threading.Event()

    def rate(self, *, giving: bool) -> int | None:
        """Bytes a second that may be given now; `giving`: somebody takes them. None: no limit."""
        return self._lower(self._latency.rate(giving=giving) if self._latency is not None else None)

    @property
    def held(self) -> int | None:
        """What those who read now are held to, for the planner; the fixed cap while nobody reads."""
        return self._lower(self._latency.held() if self._latency is not None else None)

    def grant(self, most: int) -> int:
        """Block until some of `most` bytes may be sent, or the governor is closed; returns how many.

        Under a rate that is a fiftieth of a second's worth: short for the work that goes on beside
        it, and with many readers each is served often enough not to count the source as stalled.
        """
        if self.rate(giving=True) is None:
            return most
        with self._turn():
            while True:
                rate = self.rate(giving=True)
                self._bucket.hold_to(rate)
                granted = most if rate is None else _slice(rate, most)
                delay = self._bucket.spend(granted)
                if delay <= 0 or self._closed.wait(min(delay, LOOK_S)):
                    return granted

    def close(self) -> None:
        """Wake everyone who waits."""
        self._closed.set()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Strictly in order: with a plain lock, one that asks again at once would keep the others out."""
        turn = threading.Event()
        with self._lock:
            self._line.append(turn)
            self._line[0].set()
        turn.wait()
        try:
            yield
        finally:
            with self._lock:
                self._line.popleft()
                if self._line:
                    self._line[0].set()

    def _lower(self, rate: int | None) -> int | None:
        if self._cap is None or rate is None:
            return self._cap if rate is None else rate
        return min(self._cap, rate)


def _slice(rate: int, most: int) -> int:
    return min(most, MOST_GRANT, max(LEAST_GRANT, int(rate * SLICE_S)))
