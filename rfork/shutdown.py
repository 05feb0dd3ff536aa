"""Waits that a signal ends. On the main thread of a process.

Python runs a signal's handler between two steps of the main thread. One that comes in the last moment before
that thread begins to wait for a lock, or that the system gives to another thread, does not end the wait: its
handler runs after it. A wait without end would lose the signal; these wait HEARD_S at a time.

Nor may a handler take a lock that the main thread may hold just then, as that of a threading.Event is while
the thread begins to wait for it: neither would ever go on. A SimpleQueue may be put into from anywhere.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

POLL_INTERVAL_S: Final = 1.0
"""Longest time until a signal is heard."""

T = TypeVar("T")


class ShutdownEvent:
    """A flag that a signal's handler may set, whatever the main thread does just then."""

    def __init__(self) -> None:
        self._set = False
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it for good, and wake who waits for it."""
        self._set = True
        self._wakeups.put(None)

    def wait(self, for_s: float) -> bool:
        """Block until it is set, for so many seconds; returns whether it is. One thread waits at a time."""
        if not self._set:
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=for_s)
        return self._set


def shutdown_on_signal() -> ShutdownEvent:
    """Set by SIGINT or SIGTERM from now on; the second one ends the process at once.

    To be called before anybody is told that the command is ready: whoever was told may end it.
    """
    stopped = ShutdownEvent()

    def stop(number: int, frame: object) -> None:
        stopped.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopped


def wait_for_shutdown(stopped: ShutdownEvent, *, for_s: float = math.inf) -> bool:
    """Block until it is set, by a handler too, for so many seconds; returns whether it is."""
    end = time.monotonic() + for_s
    while not stopped.wait(min(POLL_INTERVAL_S, max(0, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True


def get_interruptible(queue: SimpleQueue[T]) -> T:
    """Block until it has something, by a handler too."""
    while True:
        with contextlib.suppress(Empty):
            return queue.get(timeout=POLL_INTERVAL_S)
