"""Rate limits for readers that the source cannot throttle: one-sided reads run no code here. Runs on the
source.

The limit is sent in the progress stream, and the reader applies it: this is cooperation, not enforcement,
since a reader with access to the memory can read at any speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rfork.source.egress_limiter import POLL_INTERVAL_S, EgressLimiter

MIN_DECREASE, MIN_INCREASE = 0.9, 1.25
"""Smaller relative changes of the rate are not sent."""
INCREASE_INTERVAL_S = 0.2
"""Minimum interval between increases of the rate; decreases are sent immediately."""


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
