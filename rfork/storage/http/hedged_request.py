"""A second request that runs concurrently with a slow one. The first to complete wins, and the other is
cancelled.

The second request writes to separate memory, and the thread of the first copies from there. Only the caller's
thread ever writes to the caller's views, and no thread does after it has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rfork.errors import RforkError
from rfork.logs import logger
from rfork.net.stream import ScatterCursor
from rfork.storage.http.connect import Cancelled, CancelScope
from rfork.storage.http.hedging import MIN_DELAY_S, HedgePolicy
from rfork.storage.http.retry import RetryableError

Fetch = Callable[[ScatterCursor, int, int], None]
"""Fills a cursor with bytes `[begin, end)` in one attempt."""

log = logger(__name__)


class HedgedRequest:
    """The bytes that a first request is still missing, up to `end`, and a second request for them, if any.

    All methods run on the thread of the first request, which owns `scope` and fills `cursor`; that began at
    byte `offset`. `second` is cancelled when its result is no longer needed.
    """

    def __init__(
        self,
        hedges: HedgePolicy,
        cursor: ScatterCursor,
        offset: int,
        end: int,
        scope: CancelScope,
        second: CancelScope,
        fetch: Fetch,
    ) -> None:
        self._hedges = hedges
        self._cursor = cursor
        self._offset = offset
        self._end = end
        self._scope = scope
        self._second = second
        self._fetch = fetch
        self._begin = 0
        self._scratch = bytearray()
        self._received_bytes = 0
        self._thread: threading.Thread | None = None

    def on_slow(self) -> float | None:
        """Send the second request, or return the seconds after which to try again if the limit is reached."""
        if self._thread is not None:
            return None
        begin = self._offset + self._cursor.done
        if not self._hedges.reserve(self._end - begin):
            return MIN_DELAY_S
        try:
            self._begin, self._scratch = begin, bytearray(self._end - begin)
            thread = threading.Thread(target=self._run, name="rfork-hedge", daemon=True)
            thread.start()
        except (MemoryError, RuntimeError) as error:  # RuntimeError: cannot start a new thread
            self._hedges.release(self._end - begin)
            log.debug("hedged request not sent", reason=str(error))
            return MIN_DELAY_S
        self._thread = thread
        return None

    def wait_result(self) -> None:
        """Wait until the second request has ended, and copy the bytes that the first is missing."""
        if self._thread is None:
            return
        self._thread.join()
        lacking = self._offset + self._cursor.done - self._begin
        source = memoryview(self._scratch)[lacking : self._received_bytes]
        for target in self._cursor.window(len(source), len(source)):
            target[:], source = source[: len(target)], source[len(target) :]
            self._cursor.advance(len(target))

    def stop(self) -> None:
        """Cancel the second request. Its thread ends asynchronously and only uses its own memory."""
        self._second.end()

    def _run(self) -> None:
        cursor = ScatterCursor([memoryview(self._scratch)])
        try:
            self._fetch(cursor, self._begin, self._end)
        except (Cancelled, RetryableError, OSError, RforkError) as error:
            # The first request continues, and will meet any problem with the object itself.
            log.debug("hedged request failed", reason=str(error))
        finally:
            self._received_bytes = cursor.done
            self._hedges.release(self._end - self._begin)
        if not cursor.left:
            self._scope.end()
