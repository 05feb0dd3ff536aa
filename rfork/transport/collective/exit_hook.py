"""Cleanup that must run before the interpreter exits."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable


class ExitHook:
    """Calls a method of an object at process exit, unless `cancel` was called or the object was collected.

    When the interpreter shuts down, it unwinds the stack of any thread that returns from C++; that aborts the
    process (SIGABRT). So no thread may be inside a process group at that point. The interpreter runs this
    hook when its main thread has finished, but not if a signal kills the process.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = weakref.WeakMethod(end, lambda _: self.cancel())
        atexit.register(self._run)

    def cancel(self) -> None:
        """Unregister the hook. Idempotent."""
        atexit.unregister(self._run)

    def _run(self) -> None:
        end = self._end()
        if end is not None:
            end()
