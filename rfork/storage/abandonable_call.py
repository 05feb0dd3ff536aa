"""A call that may hang forever, on a thread that the caller can abandon. Runs on the target."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from rfork.errors import StorageError

Result = TypeVar("Result")

SLICE_S: Final = 1.0
"""An unbounded wait is split into slices. Otherwise a signal that arrives just before the wait would not be
handled.
"""


class AbandonableCall(Generic[Result]):
    """Runs `work` on its own thread, starting immediately. A result that arrives after the caller stopped
    waiting is passed to `undo`.
    """

    def __init__(self, name: str, work: Callable[[], Result], undo: Callable[[Result], None]) -> None:
        self._name = name
        self._work = work
        self._undo = undo
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._abandoned = False
        threading.Thread(target=self._run, name="rfork-attempt", daemon=True).start()

    def result(self, until: float | None = None) -> Result:
        """Return the result of `work`, or raise its error.

        Raises StorageError if it has not finished by `until` (monotonic).
        """
        with self._changed:
            while not self._results and self._error is None:
                left = until - time.monotonic() if until is not None else SLICE_S
                if left <= 0:
                    break
                self._changed.wait(min(left, SLICE_S))
            if self._error is not None:
                raise self._error
            if not self._results:
                self._abandoned = True
                waited = time.monotonic() - self._began
                raise StorageError(f"{self._name}: no response within {waited:.1f} s")
            return self._results[0]

    def _run(self) -> None:
        try:
            result = self._work()
        except BaseException as error:  # re-raised by result()
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return
        with self._changed:
            late = self._abandoned
            if not late:
                self._results.append(result)
                self._changed.notify_all()
        if late:
            self._undo(result)
