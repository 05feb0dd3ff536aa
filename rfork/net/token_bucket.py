"""Byte budget that fills at an adjustable rate.

The source uses it for its total egress, a reader for the rate that its source requested.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLICE_S = 0.02
"""Seconds of budget in one unit of work: other users of the same core or link wait no longer than this."""
BURST_S = 0.04
"""Seconds of budget that can accumulate: small, so that an idle reader does not resume with a long burst."""


class TokenBucket:
    """Token bucket that may go into debt. Thread-safe.

    Bytes may be consumed whenever there is no debt, and become the new debt. So work of any size proceeds,
    and the rate holds on average. `rate` is in bytes per second; None is unlimited.
    """

    def __init__(self, rate: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._filled_at = clock()
        self._debt = 0.0  # negative: accumulated budget

    @property
    def rate(self) -> float | None:
        """Current rate in bytes per second."""
        return self._rate

    def set_rate(self, rate: float | None) -> None:
        """Change the rate. A lower rate does not extend the time until existing debt is paid."""
        if rate == self._rate:
            return
        with self._lock:
            self._fill()
            if rate is None or self._rate is None:
                self._debt = 0.0
            elif rate < self._rate:
                # Bytes consumed at a high rate must not take minutes to pay off at a low one.
                self._debt *= rate / self._rate
            self._rate = rate

    def consume(self, nbytes: int) -> float:
        """Consume `nbytes` and return 0.0, or consume nothing and return the seconds to wait."""
        with self._lock:
            self._fill()
            if self._rate is None:
                return 0.0
            if self._debt >= 1:  # less than one byte is a rounding error
                return self._debt / self._rate
            self._debt += nbytes
            return 0.0

    def _fill(self) -> None:
        now = self._clock()
        if self._rate is not None:
            self._debt = max(self._debt - (now - self._filled_at) * self._rate, -BURST_S * self._rate)
        self._filled_at = now
