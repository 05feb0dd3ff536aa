"""Controls the egress rate by the latency of the engine's own steps. Runs on the source.

The engine reports the duration of each step (a decode step, a request). The controller limits egress to the rate
at which steps take `max_ratio` times as long on average as they do while almost nothing is sent, and does not limit
it if egress does not slow them down. It uses the mean: unlike a high quantile, it shows a small disturbance even if
durations vary, and it shows a few very late steps too.

- Egress pauses for a few percent of the time, so that steps with and without it are compared under the same load:
  a heavier load is not mistaken for a disturbance, and a disturbance is not learned as normal.
- The rate rises while there is no evidence of a disturbance, and falls on evidence. If the next pause shows that
  steps are as slow without egress, the rate returns to its former value.
- There is no limit while no step is running and none ended recently.

The rate never falls below `floor`, so that no reader considers the source stalled. The decisions are those of
`rfork.source.rate_controller`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final

from typing_extensions import Self

from rfork.image.chunks import MIB
from rfork.source.rate_controller import RateController
from rfork.source.step_sequence import StepSequence

MIN_RATE: Final = 8 * MIB
MAX_PENDING_STEPS: Final = 1024


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
        self._controller = RateController(max_ratio) if max_ratio else None
        self._floor = floor
        self._clock = clock
        # Serving threads only append here; sending threads process it under the lock.
        self._ended: deque[tuple[float, float]] = deque(maxlen=MAX_PENDING_STEPS)
        self._running: dict[int, float] = {}
        self._lock = threading.Lock()

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
        if self._controller is None:
            return None
        floor = self._floor()
        with self._lock:
            now = self._clock()
            steps = [self._ended.popleft() for _ in range(len(self._ended))]
            running_since = min(self._running.copy().values(), default=None)
            self._controller.add_steps(now, steps, running_since, floor)
            return self._controller.rate(now, active=active, is_running=running_since is not None, floor=floor)

    def current_limit(self) -> int | None:
        """Return the rate limit of the current readers; None: no limit, or no readers."""
        if self._controller is None:
            return None
        floor = self._floor()
        with self._lock:
            now = self._clock()
            is_serving = self._controller.is_serving(now, is_running=bool(self._running))
            return self._controller.limit(floor) if is_serving and self._controller.has_egress(now) else None


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
