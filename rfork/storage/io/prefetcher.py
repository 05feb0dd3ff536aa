"""Reads storage on threads that can be abandoned. Runs on the target.

A read of a file may hang forever: one of a network file system whose server is unavailable cannot be
interrupted. So storage is read into separate memory, on daemon threads, and the caller copies the bytes. A
thread that hangs keeps only its own scratch memory.

Each read of an object store takes a round trip before its first byte, and one connection has limited
throughput. So several reads run concurrently and prefetch the next ranges: only as many as complete soon, as
they share one link, and downstream instances wait for the first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rfork.errors import SourceUnavailable
from rfork.image.chunks import MIB
from rfork.image.ranges import Range
from rfork.settings import StorageSettings
from rfork.storage.base import RangeReader

BLOCK_BYTES: Final = 8 * MIB
"""Maximum size of one read: large enough to amortise the cost of a request."""
PREFETCH_HORIZON_S: Final = 0.25
"""Time whose bytes are kept in flight: more than the latency of any response."""
MIN_READS_IN_FLIGHT: Final = 2
"""Minimum reads in flight: the next round trip completes while the previous bytes arrive."""
RESERVED_BLOCKS: Final = 2
"""Blocks of memory reserved for ranges that a caller waits for."""
EWMA_ALPHA: Final = 0.2
"""Weight of the newest block in the mean rate."""

PrefetchHints = Callable[[], tuple[Sequence[Range], Sequence[Range]]]
"""The ranges in flight or about to be read, and those that are read next, in order."""


class _Throughput:
    """Bytes per second while any read is in flight, weighted towards the newest."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._since = 0.0

    def began(self, now: float) -> None:
        """Record the first read in flight after an idle time."""
        self._since = now

    def arrived(self, now: float, nbytes: int) -> None:
        """Record bytes that arrived."""
        self._bytes = (1 - EWMA_ALPHA) * self._bytes + nbytes
        self._seconds = (1 - EWMA_ALPHA) * self._seconds + now - self._since
        self._since = now

    def bytes_in(self, seconds: float) -> float:
        """Return the bytes that arrive in a time; 0 while the rate is unknown."""
        return self._bytes / self._seconds * seconds if self._seconds else 0.0


class _RangeRead:
    """One range: its requested part, and the blocks that arrived and were not consumed yet."""

    def __init__(self, storage: RangeReader, begin: int, end: int) -> None:
        self.storage = storage
        self.begin = begin
        self.end = end
        self.next = begin
        self.ready: deque[tuple[int, memoryview]] = deque()
        self.finished = False
        self.error: Exception | None = None

    @property
    def fully_requested(self) -> bool:
        """True if all of it was requested."""
        return self.finished or self.next >= self.end


class StoragePrefetcher:
    """Reads ranges of storage block by block; thread-safe. `address` names the storage in errors.

    Reads up to `settings.concurrency` blocks concurrently, within `settings.staging_bytes` of memory.
    """

    def __init__(self, address: str, settings: StorageSettings) -> None:
        self.advanced_at = time.monotonic()
        """Time of the last block, or of the first request before that."""
        self.last_block_at: float | None = None
        """Time of the last block."""
        self._address = address
        self._changed = threading.Condition()
        self._closed = False
        self._block = min(BLOCK_BYTES, settings.staging_bytes // (RESERVED_BLOCKS + MIN_READS_IN_FLIGHT))
        self._max_blocks = min(settings.staging_bytes // self._block, 2 * settings.concurrency + RESERVED_BLOCKS)
        self._streams = min(settings.concurrency, self._max_blocks)
        self._threads = 0
        self._reading = 0
        self._rate = _Throughput()
        self._allocated = 0
        self._requested: list[_RangeRead] = []
        self._ahead: dict[Range, _RangeRead] = {}
        self._spare: list[memoryview] = []

    @property
    def ahead_bytes(self) -> int:
        """Number of bytes to prefetch."""
        return (self._max_blocks - RESERVED_BLOCKS) * self._block

    def close(self) -> None:
        """Stop reading; callers that wait for a block get an error immediately."""
        with self._changed:
            self._closed = True
            self._ahead.clear()
            self._changed.notify_all()

    def idle_seconds(self, now: float) -> float:
        """Return how long callers have waited for the next block; 0 if none waits."""
        with self._changed:
            return max(0.0, now - self.advanced_at) if self._requested else 0.0

    def read(
        self, storage: RangeReader, begin: int, end: int, prefetch_hints: PrefetchHints | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield the blocks of image range `[begin, end)` as they arrive, with their offsets.

        A block is valid until the next is requested. `prefetch_hints` is called with the lock, once this range was
        requested; the ranges that it returns are read meanwhile. Raises the storage's errors, and SourceUnavailable
        after `close`.
        """
        with self._changed:
            self._check_open()
            if not self._requested:
                self.advanced_at = time.monotonic()
            run = self._ahead.pop((begin, end), None) or _RangeRead(storage, begin, end)
            self._requested.append(run)
            if prefetch_hints is not None:
                # With the lock: hints that were overtaken would read ranges again that others read meanwhile.
                self._expect(storage, *prefetch_hints())
            self._start()
            self._changed.notify_all()
        try:
            left = end - begin
            while left:
                at, block = self._next(run)
                try:
                    yield at, block
                finally:
                    with self._changed:
                        self._release(block)
                left -= block.nbytes
        finally:
            with self._changed:
                self._requested.remove(run)
                self._end(run)

    def _next(self, run: _RangeRead) -> tuple[int, memoryview]:
        with self._changed:
            while not (run.ready or run.error or self._closed):
                self._changed.wait()
            self._check_open()
            if run.ready:
                return run.ready.popleft()
            raise run.error or SourceUnavailable(f"{self._address}: storage was closed")

    def _check_open(self) -> None:
        if self._closed:
            raise SourceUnavailable(f"{self._address}: storage was closed")

    # -- the caller holds the lock ---------------------------------------------------------------------

    def _expect(self, storage: RangeReader, assigned: Sequence[Range], coming: Sequence[Range]) -> None:
        """Prefetch the `coming` ranges, as far as memory allows, instead of the previous ones.

        Ranges in `assigned` that were prefetched are kept: they are about to be read.
        """
        before = self._ahead
        self._ahead = {part: before[part] for part in assigned if part in before}
        left = self.ahead_bytes
        for part in coming:
            if left <= 0:
                break
            self._ahead[part] = before.get(part) or _RangeRead(storage, *part)
            left -= part[1] - part[0]
        for part, run in before.items():
            if part not in self._ahead:
                self._end(run)

    def _start(self) -> None:
        """Start as many threads as there is work for."""
        runs = (*self._requested, *self._ahead.values())
        work = sum(-(-(run.end - run.next) // self._block) for run in runs if not run.fully_requested)
        for _ in range(min(self._streams, self._threads + work) - self._threads):
            self._threads += 1
            threading.Thread(target=self._work, name="rfork-storage", daemon=True).start()

    def _end(self, run: _RangeRead) -> None:
        run.finished = True
        while run.ready:
            self._release(run.ready.popleft()[1])
        self._changed.notify_all()

    def _release(self, block: memoryview) -> None:
        self._allocated -= 1
        self._spare.append(block)
        self._changed.notify_all()

    def _next_block(self) -> tuple[_RangeRead, int, memoryview] | None:
        """Wait until a block may be read, and return it with its memory; None if there is none."""
        while not self._closed:
            wanted = next((run for run in self._requested if not run.fully_requested), None)
            run = wanted or next((run for run in self._ahead.values() if not run.fully_requested), None)
            if run is None:
                return None
            size = min(self._block, run.end - run.next)
            depth = max(MIN_READS_IN_FLIGHT, min(self._streams, int(self._rate.bytes_in(PREFETCH_HORIZON_S) / size)))
            max_allocated = self._max_blocks if wanted else min(self._max_blocks - RESERVED_BLOCKS, 2 * depth)
            if self._reading < depth and self._allocated < max_allocated:
                at, run.next = run.next, run.next + size
                if not self._reading:
                    self._rate.began(time.monotonic())
                self._reading += 1
                self._allocated += 1
                return run, at, self._scratch(size)
            self._changed.wait()
        return None

    def _scratch(self, size: int) -> memoryview:
        while self._spare:
            scratch = self._spare.pop()
            buffer = memoryview(scratch.obj)
            if buffer.nbytes >= size:
                return buffer[:size]
        return memoryview(bytearray(size))

    # -- reader threads -------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    block = self._next_block()
                    if block is None:
                        self._threads -= 1
                        return
                self._fill(*block)
        except BaseException:
            with self._changed:
                self._threads -= 1
            raise

    def _fill(self, run: _RangeRead, at: int, block: memoryview) -> None:
        error: Exception | None = None
        try:
            run.storage.read(at, at + block.nbytes, [block])
        except Exception as caught:  # any error is raised where the block is consumed
            error = caught
        with self._changed:
            self._reading -= 1
            if error is None:
                self.advanced_at = self.last_block_at = now = time.monotonic()
                self._rate.arrived(now, block.nbytes)
            if error is None and not run.finished:
                run.ready.append((at, block))
                self._changed.notify_all()
                return
            self._release(block)
            if error is not None and not run.finished:
                run.error, run.next = error, run.end
