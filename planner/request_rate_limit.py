"""Request rate limit per caller: a token bucket stored as one number."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

CallerKey = tuple[bytes, str]
"""Digest of the token (empty without a valid one) and network address."""

BURST_S: Final = 2.0
"""An idle caller may send at once as many requests as its rate allows in this many seconds."""
CALLER_CACHE_SIZE: Final = 32_768
"""About 250 bytes each. The least recently active caller is dropped first, and restarts with a full bucket."""


class RateLimit:
    """Generic cell rate algorithm (ITU-T I.371): a token bucket without a refill timer.

    A bucket that fills at `rate` requests per second is represented by the time at which it will be full.
    """

    def __init__(
        self,
        rate: float,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        max_callers: int = CALLER_CACHE_SIZE,
    ) -> None:
        """`rate`: requests per second, above 0; at most `max_callers` callers are tracked."""
        self._interval_s = 1 / rate
        # With less than one request per burst, single requests must still pass.
        self._burst_s = max(BURST_S, self._interval_s)
        self._monotonic = monotonic
        self._max_callers = max_callers
        self._full_at: OrderedDict[CallerKey, float] = OrderedDict()

    def wait_s(self, caller: CallerKey) -> float:
        """Return 0 and consume a token if the request may pass; else the seconds until it may."""
        now = self._monotonic()
        full_at = max(now, self._full_at.get(caller, now))
        wait_s = full_at + self._interval_s - now - self._burst_s
        # Difference of two floats: tolerate a thousandth of an interval.
        allowed_at = wait_s <= self._interval_s / 1000
        self._full_at[caller] = full_at + self._interval_s if allowed_at else full_at
        self._full_at.move_to_end(caller)
        if len(self._full_at) > self._max_callers:
            self._full_at.popitem(last=False)
        return 0.0 if allowed_at else wait_s
