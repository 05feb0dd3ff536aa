"""Hedged requests: a slow request is repeated concurrently. The first to complete wins, and the other is
cancelled.

The second request writes to separate memory, and the thread of the first copies from there. Only the caller's
thread ever writes to the caller's views, and no thread does after it has returned.

After J. Dean and L. A. Barroso, "The Tail at Scale" (2013).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Final

from rfork.errors import RforkError
from rfork.logs import logger
from rfork.net.connect import Cancelled, CancelScope
from rfork.net.stream import ScatterCursor
from rfork.storage.http.retry import RetryableError

MIN_SAMPLES: Final = 16
"""Completed requests before any request can count as slow."""
MAX_SAMPLES: Final = 64
"""Number of latest requests from which typical times are computed."""
MIN_DELAY_S: Final = 0.5
"""Minimum delay before hedging: a second request costs the server as much as the first."""
MAX_HEDGED_FRACTION: Final = 0.05
"""Maximum ratio of second requests to completed ones: if all are slow, more requests would slow them further."""

Fetch = Callable[[ScatterCursor, int, int], None]
"""Fills a cursor with bytes `[begin, end)` in one attempt."""

log = logger(__name__)


class HedgePolicy:
    """Request times of one store's servers, and limits for second requests. Uses no clock. Thread-safe.

    `factor`: multiple of the typical time after which a request is hedged; 0: never. `max_bytes`: memory
    limit of second requests in progress.
    """

    def __init__(self, factor: float, max_bytes: int) -> None:
        self._factor = factor
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._first_byte_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._bodies: deque[tuple[float, int]] = deque(maxlen=MAX_SAMPLES)
        self._completed = 0
        self._inflight_bytes = 0
        self._started = 0

    @property
    def started(self) -> int:
        """Number of second requests so far."""
        with self._lock:
            return self._started

    @property
    def inflight_bytes(self) -> int:
        """Memory in use by second requests."""
        with self._lock:
            return self._inflight_bytes

    def record_response(self, nbytes: int, first_byte_s: float, seconds: float) -> None:
        """Record a completed first request: time to the first byte, and total `seconds`."""
        with self._lock:
            self._completed += 1
            self._first_byte_s.append(first_byte_s)
            self._bodies.append(((seconds - first_byte_s) / max(1, nbytes), nbytes))

    def delay_s(self, nbytes: int) -> float | None:
        """Return the seconds after which a request of this size is slow; None: unknown, or never."""
        with self._lock:
            if not self._factor or self._completed < MIN_SAMPLES:
                return None
            typical_s = median(self._first_byte_s) + nbytes * _median_byte_s(self._bodies)
            return max(MIN_DELAY_S, self._factor * typical_s)

    def reserve(self, nbytes: int) -> bool:
        """Reserve a second request and its memory; return False if a limit is reached. Release it with `release`."""
        with self._lock:
            if self._started >= max(1.0, MAX_HEDGED_FRACTION * self._completed):
                return False
            if self._inflight_bytes + nbytes > self._max_bytes:
                return False
            self._started += 1
            self._inflight_bytes += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Release the memory of a second request."""
        with self._lock:
            self._inflight_bytes -= nbytes


def _median_byte_s(bodies: Iterable[tuple[float, int]]) -> float:
    """Return the typical seconds per byte: the median weighted by bytes, because small requests are
    dominated by latency."""
    ordered = sorted(bodies)
    half, passed = sum(nbytes for _, nbytes in ordered) / 2, 0
    for byte_s, nbytes in ordered:
        passed += nbytes
        if passed >= half:
            return byte_s
    return 0.0


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
        self._second.abort()

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
            self._scope.abort()
