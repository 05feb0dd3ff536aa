"""Searches the egress rate that the engine's steps tolerate. Runs on the source.

A pure state machine without clock, thread or lock; `rfork.source.latency_controller` runs it.

The speed of a host drifts by more than egress may slow it down: steps of a second ago are no comparison. So egress
alternates between *sending* and short *rests*, as in a lock-in amplifier: the steps of each sending window are
compared with those of the rests before and after it, and only what follows this rhythm is an effect of egress.

The search estimates the slowdown for each byte per second that is sent, from all recent windows. The rate is the one
at which the estimate predicts the allowed slowdown. Until it predicts any, the rate rises, faster if it is certain.
It uses means: unlike a high quantile, they show a small effect even if durations vary, and show a few very late steps
too.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from rfork.image.chunks import MIB

FIRST_RATE: Final = 64 * MIB
"""Initial rate in bytes per second."""
MAX_RATE: Final = 8 << 30
"""From this rate on, egress is not limited."""
MAX_FACTOR: Final = 8.0
"""Maximum factor by which the rate changes at once."""
CAUTIOUS_GROWTH, CAUTIOUS_DROP = 2.0, 1.1
"""Maximum factors by which it changes without certainty. Noise makes it rise: the effect of a higher one is clearer."""

SETTLE_S: Final = 0.06
"""Seconds at the start of a window until earlier bytes have been sent, and remote readers have received the rate."""
MIN_STEPS: Final = 8
"""Steps after which a short window may end."""
MIN_WINDOW_S, MAX_WINDOW_S = 0.1, 2.0
"""Minimum and maximum seconds of a short window."""
MIN_SENDING_RATIO, MAX_SENDING_RATIO = 2.0, 25.0
"""Seconds of sending per second of rest: while the estimate is uncertain; once it is certain, or there is no limit."""
MAX_RAMP_WINDOWS: Final = 4
"""Maximum sending windows without a rest between them."""

FORGETTING: Final = 0.8
"""Weight of all earlier windows in the estimate, per rest."""
MAX_COUNT: Final = 64
"""Maximum weight of a window, in steps: consecutive steps vary together, so that more of them prove little."""
MIN_SPREAD: Final = 0.02
"""Minimum standard deviation of steps, relative to their mean."""
MAX_RATIO: Final = 4.0
"""Maximum duration of a step, as a multiple of the usual one: a pause of seconds proves little about readers."""
RECENT_STEPS: Final = 64
BATCHES: Final = 8
"""Number of batches of undisturbed steps whose means are compared."""


class StepStatistics:
    """Number, mean and variance of the steps of one window."""

    def __init__(self, durations: Iterable[float] = ()) -> None:
        self.count = 0
        self._total = self._squares = 0.0
        for seconds in durations:
            self.add(seconds)

    def add(self, seconds: float) -> None:
        """Add the duration of one step."""
        self.count += 1
        self._total += seconds
        self._squares += seconds * seconds

    @property
    def mean(self) -> float:
        """Mean duration in seconds; 0 without steps."""
        return self._total / self.count if self.count else 0.0

    @property
    def relative_variance(self) -> float:
        """Variance as a multiple of the squared mean; 0 without steps."""
        if not self._total:
            return 0.0
        return max(0.0, self._squares * self.count / self._total**2 - 1)


class RateSearch:
    """Searches the highest rate at which steps take on average `1 + allowed` times as long as without egress.

    Not thread-safe. The times of all calls are in seconds and ascend.
    """

    def __init__(self, allowed: float) -> None:
        self.rate: float = FIRST_RATE
        """Bytes per second of the current sending window, or of the next one."""
        self.usual = 0.0
        """Median duration of the recent steps; 0: unknown."""
        self._allowed = allowed
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._is_resting = False
        self._began = -math.inf
        self._steps = StepStatistics()
        self._rest = StepStatistics()
        """The steps of the last rest."""
        self._sent: list[tuple[float, StepStatistics]] = []
        """Rates and steps of the sending windows since the last rest."""
        self._sending_s = 0.0
        """Duration of the current sending window; 0: it is a short one."""
        self._variance = MIN_SPREAD**2
        """Variance of a step, relative to its squared mean, with the drift between rests."""
        self._effect_sum = self._weight_sum = 0.0

    def start(self, now: float, undisturbed: Sequence[float]) -> None:
        """Begin to search: there are readers, and the engine serves. `undisturbed`: durations of the last steps."""
        self._update_usual()
        self._sent = []
        self._rest = StepStatistics(map(self._cap, undisturbed))
        self._variance = max(self._variance, self._rest.relative_variance, self._batch_variance(undisturbed))
        self._begin(now, is_resting=self._rest.count < MIN_STEPS)

    def forget(self) -> None:
        """Start with the first rate: what is known may be outdated."""
        self.rate = min(self.rate, FIRST_RATE)
        self._effect_sum = self._weight_sum = 0.0

    def record(self, seconds: float) -> None:
        """Record the duration of a step that has ended, with or without egress."""
        self._recent.append(seconds)
        if not self.usual:
            self._update_usual()

    def add(self, began: float, ended: float) -> None:
        """Add a recorded step during which there were readers. It counts if it is entirely in the current window."""
        if began >= self._began + SETTLE_S:
            self._steps.add(self._cap(ended - began))

    def advance(self, now: float, running_since: float | None, floor: int) -> None:
        """End the current window if it is due, and decide on the next one.

        `running_since`: start of the oldest step that has not ended. `floor`: bytes per second during rests.
        """
        if not self._is_due(now - self._began):
            return
        if running_since is not None and running_since >= self._began and now - running_since > self.usual:
            self._steps.add(self._cap(now - running_since))  # otherwise the latest steps would be in no window
        self._update_usual()
        if self._is_resting:
            self._end_rest(now, floor)
        else:
            self._end_sending(now, floor)

    def limit(self, floor: int) -> int | None:
        """Return the rate at this moment, in bytes per second; None: no limit."""
        return floor if self._is_resting else self.sending_limit(floor)

    def sending_limit(self, floor: int) -> int | None:
        """Return the rate of the sending windows, in bytes per second; None: no limit."""
        return None if self.rate >= MAX_RATE else max(floor, int(self.rate))

    def _is_due(self, elapsed: float) -> bool:
        count = self._steps.count
        if self._is_resting or not self._sending_s:
            return (count >= MIN_STEPS and elapsed >= SETTLE_S + MIN_WINDOW_S) or elapsed >= MAX_WINDOW_S
        return elapsed >= self._sending_s or (count >= MIN_STEPS and self._is_harmful())

    def _is_harmful(self) -> bool:
        """Return whether the current window shows a slowdown far above the allowed one."""
        effect, weight = self._compare(self._steps, self._rest)
        return bool(weight) and effect - 2 * math.sqrt(self._variance / weight) > 2 * self._allowed

    def _end_sending(self, now: float, floor: int) -> None:
        self._sent.append((self.rate, self._steps))
        if not self._sending_s and len(self._sent) < MAX_RAMP_WINDOWS and self._rest.count:
            effect_sum, weight_sum = self._sums([self._rest], floor)
            rate = self._next_rate(effect_sum, weight_sum, floor)
            if CAUTIOUS_GROWTH * self.rate < rate < MAX_RATE:  # certain
                self.rate = rate
                self._begin(now, is_resting=False)
                return
        self._begin(now, is_resting=True)

    def _end_rest(self, now: float, floor: int) -> None:
        rests = [rest for rest in (self._rest, self._steps) if rest.count]
        if len(rests) == 2:
            difference, weight = self._compare(self._steps, self._rest)
            variance = max(MIN_SPREAD**2, self._steps.relative_variance, weight * difference**2)
            self._variance += (1 - FORGETTING) * (variance - self._variance)
        rested_s = now - self._began
        before = self.rate
        if self._sent and rests:
            self._effect_sum, self._weight_sum = self._sums(rests, floor)
            self.rate = self._next_rate(self._effect_sum, self._weight_sum, floor)
        self._sent, self._rest = [], self._steps
        self._begin(now, is_resting=False)
        if self.rate < CAUTIOUS_GROWTH * before or self.rate >= MAX_RATE:
            self._sending_s = rested_s * self._sending_ratio()

    def _sending_ratio(self) -> float:
        if self.rate >= MAX_RATE or not self._rest.count:  # no limit, or steps too long for a comparison
            return MAX_SENDING_RATIO
        if not self._weight_sum:
            return MIN_SENDING_RATIO
        error = self.rate * math.sqrt(self._variance / self._weight_sum)
        return min(MAX_SENDING_RATIO, max(MIN_SENDING_RATIO, 2 * self._allowed / error))

    def _sums(self, rests: list[StepStatistics], floor: int) -> tuple[float, float]:
        """Return the sums of the least-squares estimate, with the windows since the last rest."""
        effect_sum, weight_sum = FORGETTING * self._effect_sum, FORGETTING * self._weight_sum
        for rate, steps in self._sent:
            effect, weight = self._compare(steps, *rests)
            excess = max(0.0, rate - floor)
            effect_sum += weight * excess * effect
            weight_sum += weight * excess * excess
        return effect_sum, weight_sum

    def _next_rate(self, effect_sum: float, weight_sum: float, floor: int) -> float:
        if not weight_sum:
            return self.rate
        slowdown, error = effect_sum / weight_sum, math.sqrt(self._variance / weight_sum)
        low, best, high = (self._allowed / max(1e-30, slowdown + margin) for margin in (error, 0.0, -error))
        max_rate = max(CAUTIOUS_GROWTH * self.rate, min(MAX_FACTOR * self.rate, low))
        min_rate = min(self.rate / CAUTIOUS_DROP, max(self.rate / MAX_FACTOR, high))
        return min(MAX_RATE, max(min_rate, 2 * floor, min(best, max_rate)))

    @staticmethod
    def _compare(steps: StepStatistics, *rests: StepStatistics) -> tuple[float, float]:
        """Return the slowdown of the steps relative to those of the rests, and its weight in steps; 0: unknown."""
        rested = statistics.fmean(rest.mean for rest in rests)
        if not steps.count or not rested:
            return 0.0, 0.0
        rest_count = min(MAX_COUNT, sum(rest.count for rest in rests))
        return steps.mean / rested - 1, 1 / (1 / min(MAX_COUNT, steps.count) + 1 / rest_count)

    def _batch_variance(self, durations: Sequence[float]) -> float:
        """Return the variance of a step that the means of consecutive batches show; it contains their drift."""
        size = len(durations) // BATCHES
        if not size:
            return 0.0
        batches = [durations[index * size : (index + 1) * size] for index in range(BATCHES)]
        means = StepStatistics(statistics.fmean(map(self._cap, batch)) for batch in batches)
        return means.relative_variance * min(MAX_COUNT, size)

    def _begin(self, now: float, *, is_resting: bool) -> None:
        self._is_resting, self._began, self._sending_s = is_resting, now, 0.0
        self._steps = StepStatistics()

    def _cap(self, seconds: float) -> float:
        return min(seconds, MAX_RATIO * self.usual)

    def _update_usual(self) -> None:
        self.usual = statistics.median(self._recent) if self._recent else 0.0
