"""Reads of storage on threads that can be left behind. Runs on the target.

A read of a file may hang for ever: a network's disk whose server is gone cannot be interrupted. So storage
is read beside the image, on daemon threads, and whoever wanted the bytes copies them. A thread that hangs
holds its own scratch memory and nothing else.

Each read of an object store takes a round trip before its first byte, and one connection carries only so
much. So several are under way at once, and they go on to what will be wanted next while nobody waits yet:
no more of them than bring their bytes soon, as they share one link, and whoever waits behind this instance
waits for the first.
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
from rfork.storage.base import ImageStorage

BLOCK_BYTES: Final = 8 * MIB
"""Most of one read: large enough that what a request costs a server hardly counts, and for a disk."""
PREFETCH_HORIZON_S: Final = 0.25
"""As much is under way as comes in this time: more than any answer takes to begin."""
MIN_READS_IN_FLIGHT: Final = 2
"""Reads under way at the least: the next one's round trip is over when the bytes before it are there."""
RESERVED_BLOCKS: Final = 2
"""Blocks of memory that are only for what somebody waits for."""
EWMA_ALPHA: Final = 0.2
"""Weight of the newest block in the mean rate."""

PrefetchHints = Callable[[], tuple[Sequence[Range], Sequence[Range]]]
"""The ranges that are read now, or in a moment, and those that are read next, in their order."""


class _Throughput:
    """Bytes a second while anything is under way, the newest counting most."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._since = 0.0

    def began(self, now: float) -> None:
        """Something is under way, and nothing was before."""
        self._since = now

    def arrived(self, now: float, nbytes: int) -> None:
        """So many bytes came."""
        self._bytes = (1 - EWMA_ALPHA) * self._bytes + nbytes
        self._seconds = (1 - EWMA_ALPHA) * self._seconds + now - self._since
        self._since = now

    def bytes_in(self, seconds: float) -> float:
        """The bytes that come in a time; 0 while nothing is known."""
        return self._bytes / self._seconds * seconds if self._seconds else 0.0


class _RangeRead:
    """One range: what of it was asked for, and what came and was not given yet."""

    def __init__(self, storage: ImageStorage, begin: int, end: int) -> None:
        self.storage = storage
        self.begin = begin
        self.end = end
        self.next = begin
        self.ready: deque[tuple[int, memoryview]] = deque()
        self.finished = False
        self.error: Exception | None = None

    @property
    def fully_requested(self) -> bool:
        """Whether nothing of it is left to ask for."""
        return self.finished or self.next >= self.end


class StoragePrefetcher:
    """Reads ranges of storage, block by block; thread-safe. `address` names it in errors.

    As many blocks at once as `settings` has streams, in no more memory than it allows.
    """

    def __init__(self, address: str, settings: StorageSettings) -> None:
        self.advanced_at = time.monotonic()
        """When the last block came, or the first was asked for."""
        self.last_block_at: float | None = None
        """When the last block came."""
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
        self._wanted: list[_RangeRead] = []
        self._ahead: dict[Range, _RangeRead] = {}
        self._spare: list[memoryview] = []

    @property
    def ahead_bytes(self) -> int:
        """How far ahead reads go."""
        return (self._max_blocks - RESERVED_BLOCKS) * self._block

    def close(self) -> None:
        """Whoever waits for a block is told at once that none will come."""
        with self._changed:
            self._closed = True
            self._ahead.clear()
            self._changed.notify_all()

    def idle_seconds(self, now: float) -> float:
        """How long blocks are waited for in vain; 0 where nobody waits."""
        with self._changed:
            return max(0.0, now - self.advanced_at) if self._wanted else 0.0

    def _expect(self, storage: ImageStorage, assigned: Sequence[Range], coming: Sequence[Range]) -> None:
        """Read what comes next, as far as memory goes; what was expected before counts no more.

        But what is `taken` stays, where it was expected: somebody is about to read it.
        """
        with self._changed:
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
            self._start()

    def read(
        self, storage: ImageStorage, begin: int, end: int, prefetch_hints: PrefetchHints | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """The bytes of image range `[begin, end)` as they come: offsets and blocks, each good until the next.

        `prefetch_hints` is called once this range is asked for; what it names next is read meanwhile. Raises
        what the storage raises, and SourceUnavailable after `close`.
        """
        with self._changed:
            self._check_open()
            if not self._wanted:
                self.advanced_at = time.monotonic()
            run = self._ahead.pop((begin, end), None) or _RangeRead(storage, begin, end)
            self._wanted.append(run)
            self._start()
            self._changed.notify_all()
        try:
            if prefetch_hints is not None:
                self._expect(storage, *prefetch_hints())
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
                self._wanted.remove(run)
                self._end(run)

    def _next(self, run: _RangeRead) -> tuple[int, memoryview]:
        with self._changed:
            while not (run.ready or run.error or self._closed):
                self._changed.wait()
            self._check_open()
            if run.ready:
                return run.ready.popleft()
            raise run.error or SourceUnavailable(f"{self._address}: is read no more")

    def _check_open(self) -> None:
        if self._closed:
            raise SourceUnavailable(f"{self._address}: is read no more")

    # -- the caller holds the lock ---------------------------------------------------------------------

    def _start(self) -> None:
        """Have as many threads as there is work for."""
        runs = (*self._wanted, *self._ahead.values())
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
        """The next block to read, and the memory for it; None: there is none. Waits until it may be read."""
        while not self._closed:
            wanted = next((run for run in self._wanted if not run.fully_requested), None)
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

    # -- on threads of its own -------------------------------------------------------------------------

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
        except Exception as caught:  # whatever it is, it is raised where the block is waited for
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
