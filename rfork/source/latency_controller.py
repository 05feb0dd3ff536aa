"""Controls the egress rate by the latency of the engine's own steps. Runs on the source.

The engine reports the duration of each step (a decode step, a request). The *baseline* is their duration
while almost nothing is sent; the controller limits egress to the rate at which steps take `max_ratio` times as
long on average. It uses the mean: unlike a high quantile, it shows a small disturbance even if durations
vary, and it shows a few very late steps too.

- Each step changes the rate by ``exp(gain · (max_ratio - seconds / mean))``, so that it is stable while steps
  take as long as allowed. The gain is smaller the more durations vary. Concurrent steps count as one.
- The baseline consists of steps during which at most `floor` was sent. During long transfers the controller
  pauses for a tenth of the time, so that the baseline follows the load: a heavier load is not mistaken for a
  disturbance, and a disturbance is not learned as normal.
- There is no limit while no step is running and none ended recently.

The rate never falls below `floor`, so that no reader considers the source stalled.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final

from typing_extensions import Self

from rfork.image.chunks import MIB
from rfork.source.step_sequence import StepSequence

FIRST_RATE: Final = 64 * MIB
"""Initial rate in bytes per second for an instance that was serving without readers."""
MAX_RATE: Final = 8 << 30
MIN_RATE: Final = 8 * MIB

MAX_DECREASE: Final = 0.5
"""Maximum factor by which one step lowers the rate."""
MAX_PENDING_STEPS: Final = 1024

IDLE_S: Final = 0.5
"""Seconds since the last step, and a few times its usual duration, after which the engine counts as idle."""
SETTLE_S: Final = 0.1
"""Seconds until earlier bytes have been sent, and remote readers have received a new rate."""
EGRESS_IDLE_S: Final = 1.0
"""Seconds without a rate request after which egress counts as idle. A sender that is blocked by the engine's
work makes no request, and the steps that blocked it are not a baseline.
"""
CALIBRATION_STEPS: Final = 48
MAX_PAUSE_S: Final = 2.0
REST_SHARE, FIRST_REST_SHARE = 0.1, 0.3
FIRST_PAUSE_S: Final = 5.0
"""Without a baseline: maximum seconds at `floor` to measure one."""

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
    """Undisturbed duration of the engine's steps, measured while there are no readers. Not thread-safe."""

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


class LatencyController:
    """Computes the current egress rate. Thread-safe; serving threads never wait for it.

    `max_ratio` 0 turns it off. `floor` is the minimum rate in bytes per second. `clock` is monotonic.
    """

    def __init__(
        self,
        max_ratio: float,
        *,
        floor: Callable[[], int] = lambda: MIN_RATE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_ratio = max_ratio
        self._floor = floor
        self._clock = clock
        # Serving threads only append here; sending threads process it under the lock.
        self._ended: deque[tuple[float, float]] = deque(maxlen=MAX_PENDING_STEPS)
        self._running: dict[int, float] = {}
        self._lock = threading.Lock()
        self._baseline = LatencyBaseline()
        self._rate: float = FIRST_RATE
        self._last_end = -math.inf
        self._judged_until = self._late_until = -math.inf
        self._egress_since = self._egress_until = -math.inf
        self._noisy_since = self._noisy_until = -math.inf
        self._paused_until = -math.inf
        self._has_paused = False

    # -- called by serving threads ----------------------------------------------------------------

    def record_step(self, seconds: float) -> None:
        """Record a step that ended now and took `seconds`. Costs about a microsecond."""
        self._ended.append((self._clock(), seconds))

    def measure_step(self) -> StepTimer:
        """Return a context manager that measures one step. A block that raises is not counted."""
        return StepTimer(self._clock, self._running, self.record_step)

    def track_steps(self) -> StepTracker:
        """Return a tracker of steps that one device executes one after another."""
        return StepTracker(self._clock, self._running, self.record_step)

    # -- called by sending threads ----------------------------------------------------------------

    def rate(self, *, active: bool) -> int | None:
        """Return the current rate in bytes per second; None: no limit. `active`: there are readers."""
        if not self._max_ratio:
            return None
        with self._lock:
            now = self._clock()
            self._add_sample(now)
            if active:
                self._record_egress(now)
            rate = self._rate_at(now)
            if active:
                self._record_noise(now, quiet=rate is not None and rate <= self._floor())
            return rate

    def current_limit(self) -> int | None:
        """Return the rate limit of the current readers; None: no limit, or no readers."""
        with self._lock:
            now = self._clock()
            if not self._max_ratio or now > self._egress_until or not self._is_serving(now):
                return None
            return max(self._floor(), int(self._rate))

    def _rate_at(self, now: float) -> int | None:
        if not self._is_serving(now):
            return None
        floor = self._floor()
        return floor if now < self._paused_until else max(floor, int(self._rate))

    def _is_serving(self, now: float) -> bool:
        return bool(self._running) or now - self._last_end < max(IDLE_S, 4 * self._baseline.mean)

    def _record_egress(self, now: float) -> None:
        if now > self._egress_until + IDLE_S:
            self._egress_since, self._has_paused = now, False
            self._rate = min(self._rate, FIRST_RATE)
        self._egress_until = now + SETTLE_S
        if self._pause_due(now):
            self._has_paused = True
            self._paused_until = now + self._pause_seconds()

    def _record_noise(self, now: float, *, quiet: bool) -> None:
        if quiet:
            self._noisy_until = min(self._noisy_until, now + SETTLE_S)
            return
        if now > self._noisy_until:
            self._noisy_since = now
        self._noisy_until = now + EGRESS_IDLE_S

    def _pause_due(self, now: float) -> bool:
        if now < self._paused_until or not self._is_serving(now):
            return False
        if not self._baseline.known and not self._has_paused:
            return True
        # Rest early the first time: the arrival of the readers was work too, and is in the baseline.
        share = REST_SHARE if self._has_paused else FIRST_REST_SHARE
        return now - max(self._paused_until, self._egress_since) >= self._pause_seconds() * (1 / share - 1)

    def _pause_seconds(self) -> float:
        if not self._baseline.known:
            return FIRST_PAUSE_S
        return SETTLE_S + min(MAX_PAUSE_S, CALIBRATION_STEPS * self._baseline.mean)

    def _add_sample(self, now: float) -> None:
        """Process the steps that have ended, and running ones that are already much too late."""
        learnt = False
        while self._ended:
            at, seconds = self._ended.popleft()
            self._last_end = at
            self._adjust_rate(at, seconds)
            if self._is_idle(at - seconds, at):
                self._baseline.add(at, seconds, resting=at - seconds >= self._egress_since)
                learnt = True
        if learnt and self._baseline.measure(now):
            self._paused_until = min(self._paused_until, now)
        if self._baseline.known and now - self._late_until >= self._baseline.mean:
            began = min(self._running.copy().values(), default=now)
            if now - began > MAX_RATIO * self._baseline.mean:
                self._adjust_rate(now, now - began, ended=False)

    def _adjust_rate(self, at: float, seconds: float, *, ended: bool = True) -> None:
        """Adjust the rate by one step, if egress may have affected it."""
        began = at - seconds
        if not self._baseline.known or at < self._egress_since or began > self._egress_until:
            return
        # Only the part of its time not covered by another step: concurrent steps count as one. A running step
        # counts only for late ones: it may hang forever, and the others show how the work proceeds.
        late = seconds > MAX_RATIO * self._baseline.mean
        until = max(self._judged_until, self._late_until) if late else self._judged_until
        if at <= max(self._paused_until, until):
            return
        part = (at - until) / seconds if began < until else 1.0
        if ended:
            self._judged_until = at
        else:
            self._late_until = at
        slow = self._baseline.slowdown_ratio(seconds)
        step = math.exp(self._baseline.gain * part * (self._max_ratio - slow))
        self._rate = min(max(self._rate * max(MAX_DECREASE, step), self._floor()), MAX_RATE)

    def _is_idle(self, began: float, ended: float) -> bool:
        if ended <= self._noisy_since:
            return False  # it ended before the recorded times of egress, so nothing is known about it
        return began >= self._noisy_until


class StepTimer:
    """One running step: from the `with` statement to its end."""

    def __init__(
        self, clock: Callable[[], float], running: dict[int, float], record_step: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._running = running
        self._observe = record_step
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = self._clock()
        self._running[id(self)] = self._began
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.pop(id(self), None)
        if exc_type is None:
            self._observe(self._clock() - self._began)


class StepTracker:
    """Steps that one device executes one after another, reported by their launches and ends. Thread-safe.

    See `rfork.source.step_sequence`.
    """

    def __init__(
        self, clock: Callable[[], float], running: dict[int, float], record_step: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._running = running
        self._record_step = record_step
        self._lock = threading.Lock()
        self._steps = StepSequence()

    def begin(self) -> int:
        """Return the number of a step that is launched now."""
        with self._lock:
            step = self._steps.begin(self._clock())
            self._update_running()
        return step

    def end(self, step: int, *, counted: bool = True) -> None:
        """Record that a step has ended now. Its duration is used only if it is `counted`."""
        with self._lock:
            seconds = self._steps.end(step, self._clock())
            self._update_running()
        if seconds is not None and counted:
            self._record_step(seconds)

    def cancel(self, step: int) -> None:
        """Forget a step that failed or launched no work."""
        with self._lock:
            self._steps.cancel(step)
            self._update_running()

    def clear(self) -> None:
        """Forget all running steps."""
        with self._lock:
            self._steps.clear()
            self._update_running()

    def _update_running(self) -> None:
        if (since := self._steps.running_since) is None:
            self._running.pop(id(self), None)
        else:
            self._running[id(self)] = since
