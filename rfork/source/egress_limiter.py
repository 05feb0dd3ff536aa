"""Limits the egress rate of this instance, over all readers. Runs on the source.

The limit is the lower one of the fixed cap and of what the latency controller currently allows. Exporters
that send bytes themselves share one budget, in turns. One-sided reads run no code here, so their readers
receive a limit in the progress stream and apply it, and the budget is reduced accordingly. This is cooperation,
not enforcement: a reader with access to the memory can read at any speed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rfork.net.token_bucket import TokenBucket
from rfork.source.latency_controller import LatencyController

GRANT_S = 0.1
"""Seconds of budget in one grant at low rates: each grant costs about half a millisecond of a busy core."""
MIN_GRANT = 16 << 10
"""Minimum size of a grant in bytes, unless less is requested: smaller grants cost more than they transfer."""
MAX_GRANT = 2 << 20
"""Maximum size of a grant in bytes under a rate: a grant is sent regardless of the next rate."""
MAX_UNLIMITED_GRANT = 16 << 20
"""Maximum size of a grant without a rate: it has been sent soon after the latency controller lowers the rate."""
POLL_INTERVAL_S = 0.05
"""Waiting readers check this often whether the rate has changed."""
MIN_DECREASE, MIN_INCREASE = 0.9, 1.25
"""Smaller relative changes of the rate are not sent."""
INCREASE_INTERVAL_S = 0.05
"""Minimum interval between increases of the rate; decreases are sent immediately."""


class EgressLimiter:
    """Budget of one instance. `cap` is in bytes per second; None: only `latency` limits, if given.

    Without any limit, no request waits. `part` is the fraction of the rate granted here, above 0 and
    at most 1: the rest is for readers that need no grants.
    """

    def __init__(
        self,
        cap: int | None,
        latency: LatencyController | None = None,
        *,
        part: Callable[[], float] = lambda: 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cap = cap
        self._latency = latency
        self._part = part
        self._bucket = TokenBucket(clock=clock)
        self._lock = threading.Lock()
        self._turn_active = False  # a thread has the turn: it waits for the budget, the others for the turn
        self._waiters: dict[str, deque[threading.Event]] = {}  # by fork, in order of turns; none is empty
        self._closed = threading.Event()

    def rate(self, *, active: bool) -> int | None:
        """Return the current rate in bytes per second; `active`: there are readers. None: no limit."""
        return self._recompute(self._latency.rate(active=active) if self._latency is not None else None)

    @property
    def current_limit(self) -> int | None:
        """Limit of the current readers, for the planner; the fixed cap if there are none."""
        return self._recompute(self._latency.current_limit() if self._latency is not None else None)

    def grant(self, max_bytes: int, fork_id: str) -> int:
        """Block until some of `max_bytes` bytes may be sent, or the limiter is closed; return how many.

        Waiting forks get one grant each in turn, regardless of their number of connections. Under a rate, a
        grant is small: concurrent work soon gets the core back, and each of many readers is served often enough
        not to consider the source stalled.
        """
        if self.rate(active=True) is None:
            return max_bytes if self._latency is None else min(max_bytes, MAX_UNLIMITED_GRANT)
        with self._next_waiter(fork_id):
            while True:
                rate = self._granted_rate()
                self._bucket.set_rate(rate)
                granted = max_bytes if rate is None else _slice(rate, max_bytes)
                delay = self._bucket.consume(granted)
                if delay <= 0 or self._closed.wait(min(delay, POLL_INTERVAL_S)):
                    return granted

    def close(self) -> None:
        """Wake all waiting threads."""
        self._closed.set()

    def _granted_rate(self) -> int | None:
        rate = self.rate(active=True)
        return None if rate is None else max(1, int(rate * self._part()))

    @contextmanager
    def _next_waiter(self, fork_id: str) -> Iterator[None]:
        """Wait for a turn, strictly in order: with a plain lock, a thread that requests again immediately
        would starve the others.
        """
        turn = threading.Event()
        with self._lock:
            self._waiters.setdefault(fork_id, deque()).append(turn)
            if not self._turn_active:
                self._wake_next()
        turn.wait()
        try:
            yield
        finally:
            with self._lock:
                # Queue after all that arrived during its turn: then one connection gets as much as many.
                if fork_id in self._waiters:
                    self._waiters[fork_id] = self._waiters.pop(fork_id)
                self._wake_next()

    def _wake_next(self) -> None:
        """Pass the turn to the first thread of the next fork, if any waits. The lock must be held."""
        self._turn_active = bool(self._waiters)
        if self._turn_active:
            fork_id, line = next(iter(self._waiters.items()))
            line.popleft().set()
            if not line:
                del self._waiters[fork_id]

    def _recompute(self, rate: int | None) -> int | None:
        if self._cap is None or rate is None:
            return self._cap if rate is None else rate
        return min(self._cap, rate)


def _slice(rate: int, max_bytes: int) -> int:
    return min(max_bytes, MAX_GRANT, max(MIN_GRANT, int(rate * GRANT_S)))


class ReaderRateAdvisor:
    """Divides the egress rate among readers, and calls `notify` when their share has changed.

    `readers` returns their number. The thread starts with the first call of `per_reader_rate`.
    """

    def __init__(
        self,
        limiter: EgressLimiter,
        readers: Callable[[], int],
        notify: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limiter = limiter
        self._readers = readers
        self._notify = notify
        self._clock = clock
        self._lock = threading.Lock()
        self._advised: int | None = None
        self._advised_at = clock()
        self._closed = threading.Event()
        self._refresh_requested = threading.Event()
        self._pending_notification = threading.Event()  # changes that only one of the readers has received
        self._thread: threading.Thread | None = None

    def per_reader_rate(self) -> int | None:
        """Return the bytes per second that one reader may use now, for the next message to it; None: no
        limit.
        """
        if self.refresh():
            self._pending_notification.set()
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="rfork-rate-advisor", daemon=True)
                self._thread.start()
        self._refresh_requested.set()
        return self._advised

    def refresh(self) -> bool:
        """Recompute the rate; return True if readers must be notified."""
        readers = self._readers()
        rate = self._limiter.rate(active=readers > 0)
        per_reader_rate = None if rate is None else max(1, rate // max(1, readers))
        with self._lock:
            if not self._has_changed(per_reader_rate):
                return False
            self._advised, self._advised_at = per_reader_rate, self._clock()
            return True

    def close(self) -> None:
        """End the thread; idempotent."""
        with self._lock:
            self._closed.set()
            thread = self._thread
        self._refresh_requested.set()
        self._pending_notification.set()
        if thread is not None:
            thread.join()

    def _has_changed(self, per_reader_rate: int | None) -> bool:
        advised = self._advised
        if per_reader_rate is None or advised is None:
            return per_reader_rate is not advised
        if per_reader_rate < advised * MIN_DECREASE:
            return True
        return per_reader_rate > advised * MIN_INCREASE and self._clock() - self._advised_at >= INCREASE_INTERVAL_S

    def _run(self) -> None:
        while True:
            self._refresh_requested.clear()
            if self._closed.is_set():
                return
            if not self._readers():
                self._refresh_requested.wait()
                continue
            if self.refresh() or self._pending_notification.is_set():
                self._pending_notification.clear()
                self._notify()
            self._pending_notification.wait(POLL_INTERVAL_S)
