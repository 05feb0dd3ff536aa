"""A byte budget that fills at a rate which may change at any time. Used on both sides of the wire:

by the source, for all that it gives, and by a reader that was told what it may take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLICE_S = 0.02
"""Seconds of budget in one piece of work: what shares a core or a link with it waits no longer than that."""
BURST_S = 0.04
"""Seconds of budget that may be saved up: small, so that who idled does not go on with a long burst."""


class TokenBucket:
    """Thread-safe. Bytes may be spent whenever nothing is owed; the last spender's bytes are then owed.

    So a piece of work of any size gets through, and the rate holds on average. `rate` is in bytes a
    second; None: everything passes.
    """

    def __init__(self, rate: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._at = clock()
        self._owed = 0.0  # below zero: saved up

    @property
    def rate(self) -> float | None:
        """Bytes a second, now."""
        return self._rate

    def set_rate(self, rate: float | None) -> None:
        """From now on fill at another rate. At a lower one what is owed is paid no later than before."""
        if rate == self._rate:
            return
        with self._lock:
            self._fill()
            if rate is None or self._rate is None:
                self._owed = 0.0
            elif rate < self._rate:
                # What was spent at a high rate must not be owed for minutes at a low one.
                self._owed *= rate / self._rate
            self._rate = rate

    def consume(self, nbytes: int) -> float:
        """Spend `nbytes`: 0.0, they may go now; else nothing is spent yet, seconds to wait."""
        with self._lock:
            self._fill()
            if self._rate is None:
                return 0.0
            if self._owed >= 1:  # a part of a byte is what rounding leaves
                return self._owed / self._rate
            self._owed += nbytes
            return 0.0

    def _fill(self) -> None:
        now = self._clock()
        if self._rate is not None:
            self._owed = max(self._owed - (now - self._at) * self._rate, -BURST_S * self._rate)
        self._at = now
