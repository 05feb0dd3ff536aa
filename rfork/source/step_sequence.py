"""Durations of steps that a device executes one after another, but that are launched before the previous one ends.

An engine that schedules asynchronously launches a step while the previous one runs, so the time between its
launch and its end contains a part of the previous step. A pure state machine: times in, durations out.
"""

from __future__ import annotations

import math
from typing import Final

MAX_RUNNING: Final = 32
"""Maximum number of launched steps; engines launch two, or one for each pipeline stage."""


class StepSequence:
    """Derives each step's duration from its launch and from the ends of all steps. Not thread-safe."""

    def __init__(self) -> None:
        self._next = 0
        self._launched: dict[int, float] = {}
        """Time of the launch of each running step, oldest first."""
        self._last_end = -math.inf
        self._are_ends_reported = True

    def begin(self, at: float) -> int:
        """Return the number of a step that is launched now. If too many are running, their ends are not reported."""
        if len(self._launched) >= MAX_RUNNING:
            self._launched.clear()
            self._are_ends_reported = False
        self._next += 1
        self._launched[self._next] = at
        return self._next

    def end(self, step: int, at: float) -> float | None:
        """Return the duration of a step that ended now: since the previous end, or its own launch if that is later.

        None if it is not running, or if the end of an older step was not reported: the time since the last
        known end contains both. A device executes steps in order, so older steps have ended too.
        """
        launched = self._launched.get(step)
        if launched is None:
            return None
        self._are_ends_reported = True
        is_oldest = step == next(iter(self._launched))
        self._launched = {other: began for other, began in self._launched.items() if other > step}
        seconds = at - max(launched, self._last_end)
        self._last_end = at
        return seconds if is_oldest else None

    def cancel(self, step: int) -> None:
        """Forget a step that failed or launched no work."""
        self._launched.pop(step, None)

    def clear(self) -> None:
        """Forget all running steps."""
        self._launched.clear()

    @property
    def running_since(self) -> float | None:
        """Time since which the oldest running step has had the device for itself; None if none is known to run."""
        oldest = next(iter(self._launched.values()), None)
        return None if oldest is None or not self._are_ends_reported else max(oldest, self._last_end)
