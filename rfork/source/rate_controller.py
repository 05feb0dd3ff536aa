"""Finds the egress rate that the engine's steps tolerate. Runs on the source.

Pure state machines without clock, thread or lock; `rfork.source.latency_controller` runs them.

- `LatencyBaseline`: how long a step takes while almost nothing is sent.
- `RateSearch`: compares the steps under egress with that, and raises or lowers the rate on evidence.
- `RateController`: pauses egress from time to time, so that the comparison shows the effect of egress alone.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

from rfork.image.chunks import MIB

FIRST_RATE: Final = 64 * MIB
"""Initial rate in bytes per second for an instance that was serving without readers."""
RESUME_RATE: Final = 8 * FIRST_RATE
"""Maximum initial rate if a rate is known from earlier readers: the load may have changed since."""
MAX_RATE: Final = 4 << 30
"""From this rate on, egress is not limited."""

MIN_ALLOWED: Final = 0.005
"""Minimum of the allowed slowdown: less cannot be measured."""
MIN_EVIDENCE_STEPS, RAMP_STEPS, MAX_EVIDENCE_STEPS = 4, 8, 128
"""Steps at one rate until the rate changes: on evidence; in the first search; without evidence."""
CONFIDENCE: Final = 2.5
"""Standard errors between a measured slowdown and the allowed one that count as evidence. Consecutive steps vary
together, and the comparison is repeated, so that the usual two would be too few.
"""
MIN_SPREAD: Final = 0.02
"""Minimum standard deviation of steps, relative to the mean."""
MIN_FACTOR, MAX_FACTOR, RAMP_FACTOR, MAX_CORRECTION = 0.25, 4.0, 2.0, 1.4
"""Changes of the rate: bounds on evidence; in the first search; bound without evidence."""

IDLE_S: Final = 0.5
"""Seconds since the last step, and a few times its usual duration, after which the engine counts as idle."""
SETTLE_S: Final = 0.1
"""Seconds until earlier bytes have been sent, and remote readers have received a lower rate."""
EFFECT_S: Final = 0.05
"""Seconds until a new rate affects the steps."""
EGRESS_IDLE_S: Final = 1.0
"""Seconds without a rate request after which egress counts as idle. A sender that is blocked by the engine's
work makes no request, and the steps that blocked it are not a baseline.
"""
RESUME_S: Final = 10.0
"""Seconds without readers after which the known rate may be outdated."""
CALIBRATION_STEPS: Final = 48
MAX_PAUSE_S: Final = 2.0
REST_SHARE, CHECK_SHARE = 0.04, 0.15
"""Share of the time in which egress pauses; and until the first pause, and after a slowdown was found."""
FIRST_PAUSE_S: Final = 5.0
"""Without a baseline: maximum seconds at the minimum rate to measure one."""

MAX_RATIO: Final = 4.0
"""Maximum weight of one step, as a multiple of the usual duration: a pause of seconds proves little about
readers.
"""
MAX_SLOW_RATIO: Final = 1.5
MAX_RUNNING_RATIO: Final = 16.0
"""Duration of a running step, as a multiple of the mean, until which it counts again and again."""
BASELINE_STEPS, RECENT_STEPS, MIN_STEPS, MISFITS = 256, 32, 8, 7
BASELINE_S: Final = 30.0
"""Older steps are discarded if there are enough newer ones."""


class LatencyBaseline:
    """Undisturbed duration of the engine's steps, measured while almost nothing is sent."""

    def __init__(self) -> None:
        self.known = False
        self.mean = 0.0
        """Mean duration in seconds; the weight of a single step is limited."""
        self.spread = 0.0
        """Standard deviation as a multiple of the mean."""
        self.slow_ratio = 1.0
        """Duration of a slow step, the 90th percentile, as a multiple of the mean."""
        self.count = 0
        """Number of steps in the mean."""
        self._steps: deque[tuple[float, float, bool]] = deque(maxlen=BASELINE_STEPS)
        self._max_duration = math.inf
        self._expected_range = (0.0, math.inf)

    def cap(self, seconds: float) -> float:
        """Limit a step's duration, as in the mean."""
        return min(seconds, self._max_duration)

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
        self.spread = statistics.pstdev(capped, self.mean) / self.mean
        self.slow_ratio = max(1.0, min(MAX_SLOW_RATIO, ordered[len(ordered) * 9 // 10] / self.mean))
        self.count = len(ordered)
        first, self.known = not self.known, True
        return first


class RateSearch:
    """Searches the highest rate at which egress delays the average step by at most `allowed` times a slow step.

    Egress that is sent in small amounts delays all steps alike, so slow steps then take `1 + allowed` times as long.
    Steps at the current rate are collected until they are evidence for more or less than the allowed slowdown;
    the rate then changes in proportion. Until a slowdown has been found, the rate doubles while there is no sign of
    one.
    """

    def __init__(self, allowed: float) -> None:
        self.rate: float = FIRST_RATE
        self.is_suspicious = False
        """A slowdown was found, and not compared with a newer baseline yet."""
        self._allowed = max(allowed, MIN_ALLOWED)
        self._ramping = True
        self._rate_before, self._slow_mean = 0.0, 0.0
        self._clear()

    def resume(self) -> None:
        """Start again with a rate that may be outdated."""
        self.rate = min(self.rate, RESUME_RATE)
        self._clear()

    def add(self, seconds: float, weight: float) -> None:
        """Add a step at the current rate, and its weight, at most 1."""
        self._count += weight
        self._total += weight * seconds
        self._squares += weight * seconds * seconds

    def check(self, baseline: LatencyBaseline) -> None:
        """Compare with a newer baseline. If it explains the last slowdown, the rate is as before that."""
        if self.is_suspicious and self._slow_mean <= baseline.mean * (1 + self._allowed * baseline.slow_ratio):
            self.rate = max(self.rate, self._rate_before)
        self.is_suspicious = False
        self._clear()

    def decide(self, baseline: LatencyBaseline, floor: float) -> bool:
        """Change the rate if the collected steps suffice; return whether it has changed."""
        if self._count < MIN_EVIDENCE_STEPS:
            return False
        mean = self._total / self._count
        slowdown = mean / baseline.mean - 1
        spread = math.sqrt(max(0.0, self._squares / self._count - mean**2)) / baseline.mean
        error = max(MIN_SPREAD, spread, baseline.spread) * math.sqrt(1 / self._count + 1 / baseline.count)
        margin = CONFIDENCE * error
        allowed = self._allowed * baseline.slow_ratio
        factor = self._factor(slowdown, margin, allowed)
        if factor is None:
            return False
        if slowdown - margin > allowed:
            if not self.is_suspicious:
                self.is_suspicious, self._rate_before = True, self.rate
            self._slow_mean, self._ramping = mean, False
        self.rate = min(MAX_RATE, max(floor, self.rate * factor))
        self._clear()
        return True

    def _factor(self, slowdown: float, margin: float, allowed: float) -> float | None:
        """Return the factor by which the rate changes; None: there is no evidence yet."""
        if slowdown - margin > allowed:
            return max(MIN_FACTOR, allowed / slowdown)
        if slowdown + margin < allowed:
            # Once a slowdown has been found, there is one at a higher rate, however low this sample is.
            likely = slowdown if self._ramping else slowdown + margin / 2
            return min(MAX_FACTOR, allowed / max(likely, 1e-9))
        if self._ramping and self._count >= RAMP_STEPS and slowdown <= allowed:
            return RAMP_FACTOR
        if self._count >= MAX_EVIDENCE_STEPS:
            factor = math.sqrt(allowed / max(slowdown, 1e-9))
            return max(1 / MAX_CORRECTION, min(MAX_CORRECTION, factor))
        return None

    def _clear(self) -> None:
        self._count = self._total = self._squares = 0.0


class RateController:
    """Decides the rate from the engine's steps and the readers' requests. The times of all calls ascend.

    `max_ratio` is the allowed duration of slow steps, as a multiple of the baseline.
    """

    def __init__(self, max_ratio: float) -> None:
        self._baseline = LatencyBaseline()
        self._search = RateSearch(max_ratio - 1)
        self._last_end = -math.inf
        self._judged_until = self._late_until = -math.inf
        self._effective_since = -math.inf
        """Since then, steps show the effect of the current rate."""
        self._egress_since = self._egress_until = -math.inf
        self._noisy_since = self._noisy_until = -math.inf
        self._paused_until = -math.inf
        self._has_paused = self._is_resting = False

    def add_steps(self, now: float, steps: list[tuple[float, float]], running_since: float | None, floor: int) -> None:
        """Process the steps that have ended, as times and durations; a running one counts once it is much too late."""
        learnt = False
        for at, seconds in steps:
            self._last_end = at
            self._judge(at, seconds, floor)
            if self._is_idle(at - seconds, at):
                self._baseline.add(at, seconds, resting=at - seconds >= self._egress_since)
                learnt = True
        if learnt:
            self._measure_baseline(now)
        if running_since is None or not self._baseline.known or now - self._late_until < self._baseline.mean:
            return
        # Not for ever: a step that hangs proves little about readers.
        if MAX_RATIO < (now - running_since) / self._baseline.mean < MAX_RUNNING_RATIO:
            self._judge(now, now - running_since, floor, ended=False)

    def rate(self, now: float, *, active: bool, is_running: bool, floor: int) -> int | None:
        """Return the current rate in bytes per second; None: no limit. `active`: there are readers."""
        is_serving = self.is_serving(now, is_running=is_running)
        if self._is_resting and now >= self._paused_until:
            self._is_resting = False
            self._search.check(self._baseline)
        if active:
            self._record_egress(now, is_serving=is_serving)
        if not is_serving:
            rate = None
        elif now < self._paused_until:
            rate = floor
        else:
            rate = self.limit(floor)
        if active:
            self._record_noise(now, quiet=rate is not None and rate <= floor)
        return rate

    def limit(self, floor: int) -> int | None:
        """Return the rate for readers while the engine serves; None: no limit."""
        return None if self._search.rate >= MAX_RATE else max(floor, int(self._search.rate))

    def has_egress(self, now: float) -> bool:
        """Return whether there are readers."""
        return now <= self._egress_until

    def is_serving(self, now: float, *, is_running: bool) -> bool:
        """Return whether the engine works: a step is running, or one has ended recently."""
        return is_running or now - self._last_end < max(IDLE_S, 4 * self._baseline.mean)

    def _record_egress(self, now: float, *, is_serving: bool) -> None:
        if now > self._egress_until + IDLE_S:
            if now > self._egress_until + RESUME_S:
                self._search.resume()
            self._egress_since, self._has_paused = now, False
        self._egress_until = now + SETTLE_S
        if is_serving and self._is_pause_due(now):
            self._has_paused = self._is_resting = True
            self._paused_until = now + self._pause_seconds()

    def _record_noise(self, now: float, *, quiet: bool) -> None:
        if quiet:
            self._noisy_until = min(self._noisy_until, now + SETTLE_S)
            return
        if now > self._noisy_until:
            self._noisy_since = now
        self._noisy_until = now + EGRESS_IDLE_S

    def _is_pause_due(self, now: float) -> bool:
        if now < self._paused_until:
            return False
        if not self._baseline.known and not self._has_paused:
            return True
        # Rest early the first time: the arrival of the readers was work too, and is in the baseline.
        share = REST_SHARE if self._has_paused and not self._search.is_suspicious else CHECK_SHARE
        return now - max(self._paused_until, self._egress_since) >= self._pause_seconds() * (1 / share - 1)

    def _pause_seconds(self) -> float:
        if not self._baseline.known:
            return FIRST_PAUSE_S
        return SETTLE_S + min(MAX_PAUSE_S, CALIBRATION_STEPS * self._baseline.mean)

    def _measure_baseline(self, now: float) -> None:
        if self._baseline.measure(now):
            self._paused_until = min(self._paused_until, now)

    def _judge(self, at: float, seconds: float, floor: int, *, ended: bool = True) -> None:
        """Add a step to the search, if the current rate may have affected it."""
        began = at - seconds
        if not self._baseline.known or began > self._egress_until:
            return
        # Only the part of its time not covered by another step: concurrent steps count as one. A running step
        # counts only for late ones: it may hang forever, and the others show how the work proceeds.
        late = seconds > MAX_RATIO * self._baseline.mean
        until = max(self._judged_until, self._late_until) if late else self._judged_until
        until = max(until, self._egress_since, self._paused_until, self._effective_since)
        if at <= until:
            return
        if ended:
            self._judged_until = at
        else:
            self._late_until = at
        weight = (at - max(began, until)) / seconds if ended else 1.0
        self._search.add(self._baseline.cap(seconds), weight)
        if self._search.decide(self._baseline, floor):
            self._effective_since = at + EFFECT_S

    def _is_idle(self, began: float, ended: float) -> bool:
        if ended <= self._noisy_since:
            return False  # it ended before the recorded times of egress, so nothing is known about it
        return began >= self._noisy_until
