"""Decides when a slow request is hedged by a second one. Uses no clock.

After J. Dean and L. A. Barroso, "The Tail at Scale" (2013): hedged requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

MIN_SAMPLES: Final = 16
"""Completed requests before any request can count as slow."""
MAX_SAMPLES: Final = 64
"""Number of latest requests from which typical times are computed."""
MIN_DELAY_S: Final = 0.5
"""Minimum delay before hedging: a second request costs the server as much as the first."""
MAX_HEDGED_FRACTION: Final = 0.05
"""Maximum ratio of second requests to completed ones: if all are slow, more requests would slow them further."""


class HedgePolicy:
    """Request times of one pool's servers, and limits for second requests. Thread-safe.

    `factor`: multiple of the typical time after which a request is hedged; 0: never. `max_bytes`: memory
    limit of second requests in progress.
    """

    def __init__(self, factor: float, max_bytes: int) -> None:
        self._factor = factor
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._first_byte_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._bodies: deque[tuple[float, int]] = deque(maxlen=MAX_SAMPLES)
        self._completed = 0
        self._inflight_bytes = 0
        self._started = 0

    @property
    def started(self) -> int:
        """Number of second requests so far."""
        with self._lock:
            return self._started

    @property
    def inflight_bytes(self) -> int:
        """Memory in use by second requests."""
        with self._lock:
            return self._inflight_bytes

    def record_response(self, nbytes: int, first_byte_s: float, seconds: float) -> None:
        """Record a completed first request: time to the first byte, and total `seconds`."""
        with self._lock:
            self._completed += 1
            self._first_byte_s.append(first_byte_s)
            self._bodies.append(((seconds - first_byte_s) / max(1, nbytes), nbytes))

    def delay_s(self, nbytes: int) -> float | None:
        """Return the seconds after which a request of this size is slow; None: unknown, or never."""
        with self._lock:
            if not self._factor or self._completed < MIN_SAMPLES:
                return None
            typical_s = median(self._first_byte_s) + nbytes * _median_byte_s(self._bodies)
            return max(MIN_DELAY_S, self._factor * typical_s)

    def reserve(self, nbytes: int) -> bool:
        """Reserve a second request and its memory; return False if a limit is reached. Release it with `release`."""
        with self._lock:
            if self._started >= max(1.0, MAX_HEDGED_FRACTION * self._completed):
                return False
            if self._inflight_bytes + nbytes > self._max_bytes:
                return False
            self._started += 1
            self._inflight_bytes += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Release the memory of a second request."""
        with self._lock:
            self._inflight_bytes -= nbytes


def _median_byte_s(bodies: Iterable[tuple[float, int]]) -> float:
    """Return the typical seconds per byte: the median weighted by bytes, because small requests are
    dominated by latency."""
    ordered = sorted(bodies)
    half, passed = sum(nbytes for _, nbytes in ordered) / 2, 0
    for byte_s, nbytes in ordered:
        passed += nbytes
        if passed >= half:
            return byte_s
    return 0.0
