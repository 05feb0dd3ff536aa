"""The planner's clock as a source knows it, by which lease tokens are judged.

Each acknowledgement of a heartbeat carries the planner's time. In between this machine's monotonic clock
counts, so a wall clock that is wrong, or set while forks run, refuses no lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_SKEW_S: Final = 5.0
"""A wall clock that differs from the planner's by more is reported."""


@dataclass(frozen=True, slots=True)
class _Offset:
    """Planner's time minus monotonic time, and by how much that may be wrong."""

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
        """Take the planner's time out of an answer; the other two are times on the monotonic clock.

        The planner read its clock at some time between them, so the quickest answer tells most. One that
        contradicts it counts all the same: then the planner's clock was set, or it is another planner.
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
        """Return the planner's time, in seconds since the epoch; this machine's before the first answer."""
        with self._lock:
            offset = self._offset
        return self._wall() if offset is None else self._monotonic() + offset.seconds

    @property
    def skew_s(self) -> float | None:
        """Seconds that this machine's wall clock is ahead of the planner's; None before the first answer."""
        return None if self._offset is None else self._wall() - self.now()
