"""Running reads of an image's memory. Runs on the source.

Changing the bytes waits for these.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rfork.logs import logger

WARN_S = 1.0
"""A read that is still running this long after it was aborted is logged."""

log = logger(__name__)


class InflightReads:
    """Registry of running reads. Thread-safe; a read is one block of `track`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inflight: dict[int, Callable[[], None]] = {}
        self._next_id = 0

    @contextlib.contextmanager
    def track(self, abort: Callable[[], None]) -> Iterator[None]:
        """Register a read of the image's memory; `abort`, called from another thread, makes the block end soon."""
        with self._changed:
            self._next_id += 1
            number = self._next_id
            self._inflight[number] = abort
        try:
            yield
        finally:
            with self._changed:
                del self._inflight[number]
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> int:
        """Return once every read that has started has ended; return how many had to be aborted.

        Reads that are still running after `timeout_s` seconds are aborted.
        """
        with self._changed:
            last = self._next_id
            if self._changed.wait_for(lambda: not self._started_before(last), timeout_s):
                return 0
            aborts = self._started_before(last)
        for abort in aborts:
            abort()
        with self._changed:
            # Without a timeout: bytes that change while they are sent are worse than a late update.
            while not self._changed.wait_for(lambda: not self._started_before(last), WARN_S):
                log.warning("aborted reads are still running and delay a change of the bytes", reads=len(aborts))
        return len(aborts)

    def _started_before(self, last: int) -> list[Callable[[], None]]:
        """Return the abort functions of running reads that started as number `last` or before."""
        return [abort for number, abort in self._inflight.items() if number <= last]
