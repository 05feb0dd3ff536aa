"""How often one caller may ask: a token bucket for each, kept as one number."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

CallerKey = tuple[bytes, str]
"""Digest of the token (empty: none that is known) and address."""

BURST_S: Final = 2.0
"""A caller that was silent may send as many requests at once as it may in this many seconds."""
CALLER_CACHE_SIZE: Final = 32_768
"""About 250 bytes each. Whoever asked longest ago is forgotten first, and begins with a full bucket again."""


class RateLimit:
    """The generic cell rate algorithm (ITU-T I.371): a token bucket without a timer to fill it.

    A bucket that fills at `rate` requests a second is told by the time at which it will be full again.
    """

    def __init__(
        self,
        rate: float,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        max_callers: int = CALLER_CACHE_SIZE,
    ) -> None:
        """`rate` in requests a second, above 0; at most `max_callers` callers are remembered."""
        self._interval_s = 1 / rate
        # Below one request in the time of a burst, one at a time has to pass all the same.
        self._burst_s = max(BURST_S, self._interval_s)
        self._monotonic = monotonic
        self._max_callers = max_callers
        self._full_at: OrderedDict[CallerKey, float] = OrderedDict()

    def wait_s(self, caller: CallerKey) -> float:
        """0 where the request may pass, which takes its token; else the seconds until one would."""
        now = self._monotonic()
        full_at = max(now, self._full_at.get(caller, now))
        wait_s = full_at + self._interval_s - now - self._burst_s
        # A difference of two floats: a thousandth of an interval is no excess.
        allowed_at = wait_s <= self._interval_s / 1000
        self._full_at[caller] = full_at + self._interval_s if allowed_at else full_at
        self._full_at.move_to_end(caller)
        if len(self._full_at) > self._max_callers:
            self._full_at.popitem(last=False)
        return 0.0 if allowed_at else wait_s
