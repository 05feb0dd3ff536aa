"""Controls the egress rate by the latency of the engine's own steps. Runs on the source.

The engine reports the duration of each step (a decode step, a request). The controller limits egress to the rate
at which steps take `max_ratio` times as long on average as without egress, and does not limit it if egress does not
slow them down. The decisions are those of `rfork.source.rate_search`; here are its clock, its lock and its events.

There is no limit while no step is running and none ended recently. The rate never falls below `floor`, so that no
reader considers the source stalled.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final

from typing_extensions import Self

from rfork.image.chunks import MIB
from rfork.source.rate_search import RateSearch
from rfork.source.step_sequence import StepSequence

MIN_RATE: Final = 8 * MIB
MAX_PENDING_STEPS: Final = 1024

IDLE_S, MAX_IDLE_S = 0.5, 10.0
"""Minimum and maximum seconds since the last step after which the engine counts as idle; between them, four times the
usual duration of a step.
"""
EGRESS_S: Final = 0.1
"""Seconds after a rate request during which bytes are being sent."""
EGRESS_IDLE_S: Final = 1.0
"""Seconds without a rate request after which egress counts as idle. A sender that is blocked by the engine's
work makes no request, and the steps that blocked it are not undisturbed.
"""
UNDISTURBED_S: Final = 2.0
"""Older steps are no comparison for those under egress."""
FORGET_S: Final = 10.0
"""Seconds without egress during steps after which the known rate may be outdated."""


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
        self._is_on = bool(max_ratio)
        self._floor = floor
        self._clock = clock
        # Serving threads only append here; sending threads process it under the lock.
        self._ended: deque[tuple[float, float]] = deque(maxlen=MAX_PENDING_STEPS)
        self._running: dict[int, float] = {}
        self._lock = threading.Lock()
        self._search = RateSearch(max_ratio - 1)
        self._undisturbed: deque[tuple[float, float]] = deque(maxlen=MAX_PENDING_STEPS)
        """Ends and durations of the last steps without egress."""
        self._last_end = -math.inf
        self._last_egress = self._last_search = -math.inf

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
        if not self._is_on:
            return None
        with self._lock:
            now = self._clock()
            self._add_steps()
            is_serving = self._is_serving(now)
            if active and is_serving:
                self._advance(now)
            if active:
                self._last_egress = now
            if not is_serving:
                return None
            floor = self._floor()
            return self._search.limit(floor) if active else self._search.sending_limit(floor)

    def current_limit(self) -> int | None:
        """Return the rate limit of the current readers; None: no limit, or no readers."""
        with self._lock:
            now = self._clock()
            if not self._is_on or now > self._last_egress + EGRESS_S or not self._is_serving(now):
                return None
            return self._search.sending_limit(self._floor())

    def _is_serving(self, now: float) -> bool:
        return bool(self._running) or now - self._last_end < min(MAX_IDLE_S, max(IDLE_S, 4 * self._search.usual))

    def _add_steps(self) -> None:
        """Process the steps that have ended. One that may or may not have overlapped with egress is no sample."""
        while self._ended:
            at, seconds = self._ended.popleft()
            self._last_end = at
            self._search.record(seconds)
            began = at - seconds
            if began <= self._last_egress + EGRESS_S:
                self._search.add(began, at)
            elif began > self._last_egress + EGRESS_IDLE_S:
                self._undisturbed.append((at, seconds))

    def _advance(self, now: float) -> None:
        if now > self._last_search + EGRESS_IDLE_S:
            if now > self._last_search + FORGET_S:
                self._search.forget()
            self._search.start(now, [seconds for at, seconds in self._undisturbed if at > now - UNDISTURBED_S])
            self._undisturbed.clear()
        self._last_search = now
        self._search.advance(now, min(self._running.copy().values(), default=None), self._floor())


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
