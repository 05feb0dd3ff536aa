"""Waits that a signal ends. On the main thread of a process.

Python runs a signal's handler between two steps of the main thread. One that comes in the last moment before
that thread begins to wait for a lock, or that the system gives to another thread, does not end the wait: its
handler runs after it. A wait without end would lose the signal; these wait HEARD_S at a time.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

HEARD_S: Final = 1.0
"""Longest time until a signal is heard."""

T = TypeVar("T")


def stopped_by_signal() -> threading.Event:
    """Set by SIGINT or SIGTERM from now on; the second one ends the process at once.

    To be called before anybody is told that the command is ready: whoever was told may end it.
    """
    stopped = threading.Event()

    def stop(number: int, frame: object) -> None:
        stopped.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopped


def wait_until(event: threading.Event, *, for_s: float = math.inf) -> bool:
    """Block until it is set, by a handler too, for so many seconds; returns whether it is."""
    end = time.monotonic() + for_s
    while not event.wait(min(HEARD_S, max(0, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True


def next_of(queue: SimpleQueue[T]) -> T:
    """Block until it has something, by a handler too."""
    while True:
        with contextlib.suppress(Empty):
            return queue.get(timeout=HEARD_S)
