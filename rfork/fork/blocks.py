"""Reads of storage on threads that can be left behind. Runs on the target.

A read of a file may hang for ever: a network's disk whose server is gone cannot be interrupted. So files
are read beside the image, on a daemon thread a chunk, and whoever wanted the bytes copies them. A thread
that hangs holds its own scratch memory and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

from rfork.errors import SourceGone
from rfork.image.chunks import MIB
from rfork.storage.base import Storage

BLOCK_BYTES = 4 * MIB
"""One read: small enough for a copy that finds it in the cache, large enough for a disk's speed."""
AHEAD = 2
"""Blocks of a chunk in memory: one is copied while the next is read."""


class _Stream:
    """The blocks of one range, between the thread that reads them and the one that wants them."""

    def __init__(self) -> None:
        self.full: deque[memoryview] = deque()
        self.held = 0
        self.over = False
        self.error: Exception | None = None


class Blocks:
    """Reads ranges of one storage, block by block; thread-safe. `address` names it in errors."""

    def __init__(self, address: str) -> None:
        self.advanced_at = time.monotonic()
        """When the last block came, or the first was asked for."""
        self.gave_at: float | None = None
        """When the last block came."""
        self._address = address
        self._changed = threading.Condition()
        self._closed = False
        self._wanted = 0
        self._spare: list[memoryview] = []

    def close(self) -> None:
        """Whoever waits for a block is told at once that none will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def idle_s(self, now: float) -> float:
        """How long blocks are waited for in vain; 0 where nobody waits."""
        with self._changed:
            return max(0.0, now - self.advanced_at) if self._wanted else 0.0

    def read(self, storage: Storage, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """The bytes of image range `[begin, end)` in order: offsets and blocks, each good until the next.

        Raises what the storage raises, and SourceGone after `close`.
        """
        stream = _Stream()
        with self._changed:
            self._check_open()
            if not self._wanted:
                self.advanced_at = time.monotonic()
            self._wanted += 1
        threading.Thread(
            target=self._fill, args=(storage, stream, begin, end), name="rfork-storage", daemon=True
        ).start()
        try:
            at = begin
            while at < end:
                scratch = self._next(stream)
                block = scratch[: end - at]
                yield at, block
                at += block.nbytes
                with self._changed:
                    stream.held -= 1
                    self._spare.append(scratch)
                    self._changed.notify_all()
        finally:
            with self._changed:
                stream.over = True
                self._wanted -= 1
                self._changed.notify_all()

    def _next(self, stream: _Stream) -> memoryview:
        with self._changed:
            while not (stream.full or stream.error or self._closed):
                self._changed.wait()
            self._check_open()
            if stream.full:
                return stream.full.popleft()
            raise stream.error or SourceGone(f"{self._address}: is read no more")

    def _check_open(self) -> None:
        if self._closed:
            raise SourceGone(f"{self._address}: is read no more")

    def _fill(self, storage: Storage, stream: _Stream, begin: int, end: int) -> None:
        try:
            for at in range(begin, end, BLOCK_BYTES):
                scratch = self._scratch(stream, min(BLOCK_BYTES, end - begin))
                if scratch is None:
                    return
                until = min(at + scratch.nbytes, end)
                storage.read(at, until, [scratch[: until - at]])
                with self._changed:
                    stream.full.append(scratch)
                    self.advanced_at = self.gave_at = time.monotonic()
                    self._changed.notify_all()
        except Exception as error:  # whatever it is, it is raised where the block is waited for
            with self._changed:
                stream.error = error
                self._changed.notify_all()

    def _scratch(self, stream: _Stream, size: int) -> memoryview | None:
        """Memory for one block, once there is room; None where nobody wants it any more."""
        with self._changed:
            while stream.held == AHEAD and not (stream.over or self._closed):
                self._changed.wait()
            if stream.over or self._closed:
                return None
            stream.held += 1
            while self._spare:
                scratch = self._spare.pop()
                if scratch.nbytes >= size:
                    return scratch[:size]
        return memoryview(bytearray(size))
