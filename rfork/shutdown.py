"""Waits that signals interrupt, for the main thread of a process.

Python runs a signal's handler between two steps of the main thread. A signal that arrives just before that
thread starts to wait for a lock, or that the system delivers to another thread, does not end the wait: the
handler runs after it. An unbounded wait would miss the signal; these wait POLL_INTERVAL_S at a time.

A handler must not acquire a lock that the main thread may own at that time, such as a threading.Event's: both
would block forever. A SimpleQueue may be used from any context.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

POLL_INTERVAL_S: Final = 1.0
"""Maximum time until a signal takes effect."""

T = TypeVar("T")


class ShutdownEvent:
    """Flag that a signal handler may set at any time."""

    def __init__(self) -> None:
        self._set = False
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Return True if it is set."""
        return self._set

    def set(self) -> None:
        """Set it permanently and wake the waiting thread."""
        self._set = True
        self._wakeups.put(None)

    def wait(self, for_s: float) -> bool:
        """Block until it is set, for at most `for_s` seconds; return True if it is. Only one thread may wait."""
        if not self._set:
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=for_s)
        return self._set


def shutdown_on_signal() -> ShutdownEvent:
    """Return an event that SIGINT or SIGTERM sets; the second signal ends the process immediately.

    Call it before the command reports that it is ready: the process may be stopped from then on.
    """
    stopped = ShutdownEvent()

    def stop(number: int, frame: object) -> None:
        stopped.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopped


def wait_for_shutdown(stopped: ShutdownEvent, *, for_s: float = math.inf) -> bool:
    """Block until the event is set, also by a handler, for at most `for_s` seconds; return True if it is."""
    end = time.monotonic() + for_s
    while not stopped.wait(min(POLL_INTERVAL_S, max(0, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True


def get_interruptible(queue: SimpleQueue[T]) -> T:
    """Block until the queue has an item, also from a handler."""
    while True:
        with contextlib.suppress(Empty):
            return queue.get(timeout=POLL_INTERVAL_S)
