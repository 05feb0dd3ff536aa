"""Holds off Python's cyclic garbage collector while very many objects are made that are all kept.

A checkpoint of 20,000 tensors is some 100,000 objects in memory at once. Each 700 of them make the collector
look again at the young ones, and every so often at all that the process has: a fifth of a second, several
times what making them takes, to find nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _GcPause:
    """The process's collector, and how many want it held off. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._ran = False

    @contextmanager
    def gc_paused(self) -> Iterator[None]:
        """No collection begins by itself within this block, on any thread: for work of milliseconds.

        When the last of several such blocks is left, it is on again if it was when the first was entered.
        """
        with self._lock:
            if not self._holders:
                self._ran = gc.isenabled()
                gc.disable()
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders and self._ran:
                    gc.enable()


gc_paused = _GcPause().gc_paused
