"""Undisturbed duration of the engine's steps, measured while there are no readers. Runs on the source."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

MAX_RATIO: Final = 4.0
"""Maximum weight of one step, as a multiple of the usual duration: a pause of seconds proves little about
readers.
"""
MAX_GAIN, MIN_GAIN = 0.5, 0.05
NOISE: Final = 0.005
"""Gain times variance, in means: noise alone then changes the rate by at most a factor of about two."""

BASELINE_STEPS, RECENT_STEPS, MIN_STEPS, MISFITS = 256, 32, 8, 7
BASELINE_S: Final = 10.0
"""Older steps are discarded if there are enough newer ones."""


class LatencyBaseline:
    """Durations of recent steps without readers. Not thread-safe."""

    def __init__(self) -> None:
        self.known = False
        self.mean = 0.0
        """Mean duration in seconds; the weight of a single step is limited."""
        self.gain = MIN_GAIN
        self._steps: deque[tuple[float, float, bool]] = deque(maxlen=BASELINE_STEPS)
        self._max_duration = math.inf
        self._expected_range = (0.0, math.inf)

    def slowdown_ratio(self, seconds: float) -> float:
        """Return a step's duration as a multiple of the mean."""
        return min(seconds, self._max_duration) / self.mean

    def add(self, at: float, seconds: float, *, resting: bool) -> None:
        """Add a step; if nearly all recent ones are unusual, they start a new baseline.

        `resting`: there are readers, limited to the minimum rate. These steps are the best comparison;
        earlier ones overlapped with the readers' arrival, or are old.
        """
        self._steps.append((at, max(seconds, 1e-9), resting))
        if not self.known or len(self._steps) <= MIN_STEPS:
            return
        newest = sorted(self._steps[-index][1] for index in range(1, MIN_STEPS + 1))
        low, high = self._expected_range
        if newest[MISFITS - 1] < low or newest[-MISFITS] > high:
            while len(self._steps) > MIN_STEPS:
                self._steps.popleft()

    def measure(self, now: float) -> bool:
        """Process the added steps; returns whether the baseline has just become known."""
        while len(self._steps) > RECENT_STEPS and now - self._steps[0][0] > BASELINE_S:
            self._steps.popleft()
        if len(self._steps) < MIN_STEPS:
            return False
        rested = [seconds for _, seconds, resting in self._steps if resting]
        ordered = sorted(rested if len(rested) >= RECENT_STEPS else [step[1] for step in self._steps])
        self._max_duration = MAX_RATIO * ordered[len(ordered) // 2]
        self._expected_range = ordered[len(ordered) // 8], ordered[-1 - len(ordered) // 8]
        capped = [min(seconds, self._max_duration) for seconds in ordered]
        self.mean = statistics.fmean(capped)
        variance = statistics.pvariance(capped, self.mean) / self.mean**2
        self.gain = max(MIN_GAIN, min(MAX_GAIN, NOISE / max(variance, 1e-9)))
        first, self.known = not self.known, True
        return first
