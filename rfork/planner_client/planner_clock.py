"""Estimate of the planner's clock, used to verify lease tokens. Runs on the source.

Each heartbeat acknowledgement contains the planner's time. In between, this machine's monotonic clock counts,
so a wall clock that is wrong, or is set during a fork, does not invalidate leases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_SKEW_S: Final = 5.0
"""A larger difference between the wall clock and the planner's clock is reported."""


@dataclass(frozen=True, slots=True)
class _Offset:
    """Planner's time minus monotonic time, and the maximum error of this estimate."""

    seconds: float
    error_s: float


class PlannerClock:
    """Estimates the planner's time from its acknowledgements. Thread-safe."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._lock = threading.Lock()
        self._offset: _Offset | None = None

    def record(self, unix_s: float, sent_at: float, received_at: float) -> None:
        """Update the estimate from a response. `sent_at` and `received_at` are monotonic times.

        The planner read its clock between these times, so the fastest response is the most precise. A
        response that contradicts the estimate replaces it: the planner's clock was set, or it is another
        planner.
        """
        fresh = _Offset(unix_s - (sent_at + received_at) / 2, max(0.0, received_at - sent_at) / 2)
        with self._lock:
            kept = self._offset
            if (
                kept is None
                or fresh.error_s <= kept.error_s
                or abs(fresh.seconds - kept.seconds) > fresh.error_s + kept.error_s
            ):
                self._offset = fresh

    def now(self) -> float:
        """Return the planner's time in seconds since the epoch; before the first response, this machine's time."""
        with self._lock:
            offset = self._offset
        return self._wall() if offset is None else self._monotonic() + offset.seconds

    @property
    def skew_s(self) -> float | None:
        """Seconds by which this machine's wall clock is ahead of the planner's; None if not known yet."""
        return None if self._offset is None else self._wall() - self.now()
