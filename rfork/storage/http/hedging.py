"""When a request is sent a second time though the first has not failed: a decision, without any clock.

After J. Dean and L. A. Barroso, "The Tail at Scale" (2013): hedged requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

MIN_SAMPLES: Final = 16
"""Requests that must have been answered before one of them can be called slow."""
MAX_SAMPLES: Final = 64
"""Newest requests that say how long most take."""
MIN_DELAY_S: Final = 0.5
"""No request is slow before that: a second one costs the server as much as the first."""
MAX_HEDGED_FRACTION: Final = 0.05
"""Most second requests for each one answered; where all are slow, more would make them slower still."""


class HedgePolicy:
    """How long requests to one pool's servers take, and how many second ones there may be. Thread-safe.

    `factor`: how many times as long as most a request takes before it is sent again; 0: never.
    `max_bytes`: memory that second requests may hold at once.
    """

    def __init__(self, factor: float, max_bytes: int) -> None:
        self._factor = factor
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._first_byte_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._bodies: deque[tuple[float, int]] = deque(maxlen=MAX_SAMPLES)
        self._answered = 0
        self._inflight_bytes = 0
        self._begun = 0

    @property
    def started(self) -> int:
        """Second requests so far."""
        with self._lock:
            return self._begun

    @property
    def inflight_bytes(self) -> int:
        """Memory that second requests hold now."""
        with self._lock:
            return self._inflight_bytes

    def first_byte(self, nbytes: int, first_byte_s: float, seconds: float) -> None:
        """A first request was answered whole: its first byte after so long, its last after `seconds`."""
        with self._lock:
            self._answered += 1
            self._first_byte_s.append(first_byte_s)
            self._bodies.append(((seconds - first_byte_s) / max(1, nbytes), nbytes))

    def delay_s(self, nbytes: int) -> float | None:
        """Seconds after which a request for so many bytes is slow; None: not known, or never."""
        with self._lock:
            if not self._factor or self._answered < MIN_SAMPLES:
                return None
            usual = median(self._first_byte_s) + nbytes * _usual_byte_s(self._bodies)
            return max(MIN_DELAY_S, self._factor * usual)

    def begin(self, nbytes: int) -> bool:
        """Take a second request's place and memory; False: there is none left. `end` gives them back."""
        with self._lock:
            if self._begun >= max(1.0, MAX_HEDGED_FRACTION * self._answered):
                return False
            if self._inflight_bytes + nbytes > self._max_bytes:
                return False
            self._begun += 1
            self._inflight_bytes += nbytes
            return True

    def end(self, nbytes: int) -> None:
        """A second request has given its memory back."""
        with self._lock:
            self._inflight_bytes -= nbytes


def _usual_byte_s(bodies: Iterable[tuple[float, int]]) -> float:
    """Seconds that most bytes took: the median over bytes, as those of small requests say little."""
    ordered = sorted(bodies)
    half, passed = sum(nbytes for _, nbytes in ordered) / 2, 0
    for byte_s, nbytes in ordered:
        passed += nbytes
        if passed >= half:
            return byte_s
    return 0.0
