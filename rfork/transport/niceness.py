"""Threads that give stand back: the scheduler prefers the rest of the process to them. Runs on the source."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Made = TypeVar("Made")


def stand_back(nice: int) -> None:
    """Make the calling thread, and those it starts from now on, nicer by `nice` (0 to 19).

    A core that nothing else wants is theirs as before. A thread that is far nicer than others on a busy
    core is descheduled for long while it holds the interpreter's lock, which then holds up the threads
    that serve: with 5 their 99th percentile fell, with 10 it rose, with 19 it doubled. On Linux a niceness is a thread's own; elsewhere
    it is the process's, and nothing is done.
    """
    if nice > 0 and sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + nice))


def made_standing_back(nice: int, make: Callable[[], Made]) -> Made:
    """What `make` returns or raises; all threads that it starts stand back, the calling one does not."""
    with ThreadPoolExecutor(1, "rfork-make", initializer=stand_back, initargs=(nice,)) as maker:
        return maker.submit(make).result()
