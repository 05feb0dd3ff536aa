"""What each reader may take where the source cannot hold it back: one-sided reads run no code here.

Runs on the source. The rate goes out in the progress stream, and the reader keeps to it by itself: that is
cooperation and no enforcement, since whoever can read memory can read it as fast as it likes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rfork.seed.governor import LOOK_S, Governor

LOWER, HIGHER = 0.9, 1.25
"""A rate that changed by less is no news."""
RAISE_GAP_S = 0.2
"""Good news waits this long for the next; bad news does not."""


class Pacing:
    """Divides the governor's rate among the readers, and calls `tell` when it has changed for them.

    `readers` says how many there are. The thread starts with the first question for the share.
    """

    def __init__(
        self,
        governor: Governor,
        readers: Callable[[], int],
        tell: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._governor = governor
        self._readers = readers
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._told: int | None = None
        self._told_at = clock()
        self._closed = threading.Event()
        self._asked = threading.Event()
        self._untold = threading.Event()  # news that only one of the readers has heard
        self._thread: threading.Thread | None = None

    def share(self) -> int | None:
        """Bytes a second that one reader may take now, for the next message to it; None: no limit."""
        if self.look():
            self._untold.set()
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="rfork-pacing", daemon=True)
                self._thread.start()
        self._asked.set()
        return self._told

    def look(self) -> bool:
        """Take the rate as it is now; whether that is news for the readers."""
        readers = self._readers()
        rate = self._governor.rate(giving=readers > 0)
        share = None if rate is None else max(1, rate // max(1, readers))
        with self._lock:
            if not self._is_news(share):
                return False
            self._told, self._told_at = share, self._clock()
            return True

    def close(self) -> None:
        """End the thread; safe to call twice."""
        with self._lock:
            self._closed.set()
            thread = self._thread
        self._asked.set()
        self._untold.set()
        if thread is not None:
            thread.join()

    def _is_news(self, share: int | None) -> bool:
        told = self._told
        if share is None or told is None:
            return share is not told
        if share < told * LOWER:
            return True
        return share > told * HIGHER and self._clock() - self._told_at >= RAISE_GAP_S

    def _run(self) -> None:
        while True:
            self._asked.clear()
            if self._closed.is_set():
                return
            if not self._readers():
                self._asked.wait()
                continue
            if self.look() or self._untold.is_set():
                self._untold.clear()
                self._tell()
            self._untold.wait(LOOK_S)
