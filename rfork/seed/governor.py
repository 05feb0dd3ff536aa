"""The governor: holds what this instance gives under a rate, whoever reads.

Runs on the source. Every exporter spends from one budget, so the cap holds for the instance and not
for each reader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GRANT_S = 0.1
"""Seconds of budget in one grant, at most."""
LEAST_GRANT = 16 << 10
"""Bytes in one grant at least, unless less is asked for: smaller ones cost more than they carry."""
BURST_S = 0.05
"""Seconds of budget that may be saved up: small, so that a seed that idled does not give a long burst."""


class Governor:
    """A token bucket over bytes; without a rate it lets everything pass.

    A spender takes its bytes at once, even into debt, and sleeps its own debt off outside the lock:
    the rate holds on average, and waiting spenders are served in the order they came.
    """

    def __init__(self, rate: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._free_at = clock()

    def reserve(self, nbytes: int) -> float:
        """Take `nbytes` from the budget; returns the seconds to wait before they may be sent."""
        if self.rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            begin = max(self._free_at, now - BURST_S)
            self._free_at = begin + nbytes / self.rate
            return max(0.0, begin - now)

    def grant(self, most: int) -> int:
        """Block until some of `most` bytes may be sent, or the governor is closed; returns how many.

        Under a rate that is a tenth of a second's worth, so that with many readers each is served
        often enough not to count the source as stalled.
        """
        if self.rate is None:
            return most
        granted = min(most, max(LEAST_GRANT, int(self.rate * GRANT_S)))
        delay = self.reserve(granted)
        if delay > 0:
            self._closed.wait(delay)
        return granted

    def close(self) -> None:
        """Wake everyone who waits."""
        self._closed.set()
