"""A second request beside one that takes long. Whichever is whole first counts, and the other is cut.

The second writes into memory of its own, and the thread of the first copies out of it: so nobody but the
caller's own thread ever writes into the caller's views, and nobody at all once it has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rfork.errors import RforkError
from rfork.logs import logger
from rfork.storage.http.connect import Cancelled, CancelScope
from rfork.storage.http.hedging import MIN_DELAY_S, HedgePolicy
from rfork.storage.http.retry import RetryableError
from rfork.transport.http.stream import ScatterCursor

Fetch = Callable[[ScatterCursor, int, int], None]
"""Fills a cursor with bytes `[begin, end)`, in one attempt."""

log = logger(__name__)


class HedgedRequest:
    """What the first request for bytes up to `end` lacks, and the second request for it, if there is one.

    All methods are for the first's thread, which holds `leg` and fills `cursor`; that began at byte `offset`.
    `second` is ended where its result is not wanted any more, by whoever holds it.
    """

    def __init__(
        self,
        hedges: HedgePolicy,
        cursor: ScatterCursor,
        offset: int,
        end: int,
        leg: CancelScope,
        second: CancelScope,
        fetch: Fetch,
    ) -> None:
        self._hedges = hedges
        self._cursor = cursor
        self._offset = offset
        self._end = end
        self._leg = leg
        self._second = second
        self._fetch = fetch
        self._begin = 0
        self._scratch = bytearray()
        self._received_bytes = 0
        self._thread: threading.Thread | None = None

    def on_slow(self) -> float | None:
        """Send the second request, or say in how many seconds to ask again whether there is room for it."""
        if self._thread is not None:
            return None
        begin = self._offset + self._cursor.done
        if not self._hedges.begin(self._end - begin):
            return MIN_DELAY_S
        try:
            self._begin, self._scratch = begin, bytearray(self._end - begin)
            thread = threading.Thread(target=self._run, name="rfork-hedge", daemon=True)
            thread.start()
        except (MemoryError, RuntimeError) as error:  # RuntimeError: the system gives no further thread
            self._hedges.end(self._end - begin)
            log.debug("no second request", because=str(error))
            return MIN_DELAY_S
        self._thread = thread
        return None

    def wait_result(self) -> None:
        """Wait until the second request has ended, and take what it has and the first has not."""
        if self._thread is None:
            return
        self._thread.join()
        lacking = self._offset + self._cursor.done - self._begin
        source = memoryview(self._scratch)[lacking : self._received_bytes]
        for target in self._cursor.window(len(source), len(source)):
            target[:], source = source[: len(target)], source[len(target) :]
            self._cursor.advance(len(target))

    def stop(self) -> None:
        """End the second request; its thread ends by itself, and touches nothing but its own memory."""
        self._second.end()

    def _run(self) -> None:
        cursor = ScatterCursor([memoryview(self._scratch)])
        try:
            self._fetch(cursor, self._begin, self._end)
        except (Cancelled, RetryableError, OSError, RforkError) as error:
            # The first goes on, and meets by itself what is wrong with the object.
            log.debug("second request failed", because=str(error))
        finally:
            self._received_bytes = cursor.done
            self._hedges.end(self._end - self._begin)
        if not cursor.left:
            self._leg.end()
