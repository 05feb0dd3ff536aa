"""What has to end before the interpreter does."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable


class ExitHook:
    """Calls a method of an object that still lives when the process ends, unless `cancel` came first.

    A thread that comes back from C++ while the interpreter goes down is ended by unwinding its stack; C++
    does not let it pass, and the process dies by SIGABRT. So no thread may be within a group by then. The
    interpreter calls this when its main thread is done, and not in a process that a signal ends.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = weakref.WeakMethod(end, lambda _: self.cancel())
        atexit.register(self._run)

    def cancel(self) -> None:
        """There is nothing to end any more. Safe to call twice."""
        atexit.unregister(self._run)

    def _run(self) -> None:
        end = self._end()
        if end is not None:
            end()
