"""The sealed chunks of one image that a process holds: made by its exporter, or received by its reader.

A relay gives what it has mapped onwards, so that the bytes are in memory once.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Final

from rfork.transport.shared_memory.memfd import SealedChunk

MAX_CACHED_CHUNKS: Final = 512
"""Chunks, at most, each of which has a descriptor."""
DESCRIPTOR_DIVISOR: Final = 4
"""And of the descriptors this process may have, one in so many."""
POLL_INTERVAL_S: Final = 0.5
"""Seconds between two words to a reader whose chunk is being made for another."""


class SealedChunkCache:
    """Thread-safe. Chunks by index.

    One that is given up may still be mapped by targets: who asks for it later then costs another copy. So
    none makes way for another, and none goes for being idle.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, SealedChunk] = {}
        self._making: dict[int, threading.Lock] = {}
        self._exports = 0

    @contextlib.contextmanager
    def building(self, chunk: int, waiting: Callable[[], None]) -> Iterator[None]:
        """One thread at a time finds or makes this chunk, so that there are never two of it.

        `waiting` is called every `POLL_INTERVAL_S` as long as it is another's turn, and may raise to wait no longer.
        """
        with self._lock:
            lock = self._making.setdefault(chunk, threading.Lock())
        while not lock.acquire(timeout=POLL_INTERVAL_S):
            waiting()
        try:
            yield
        finally:
            lock.release()

    def find(self, chunk: int) -> SealedChunk | None:
        """The chunk, if it is held."""
        with self._lock:
            # The one that was wanted least lately is the first, where one has to go.
            sealed = self._kept.pop(chunk, None)
            if sealed is not None:
                self._kept[chunk] = sealed
            return sealed

    def keep(self, chunk: int, sealed: SealedChunk) -> None:
        """Hold a chunk, in place of an earlier one; not where the shelf is full."""
        max_chunks = _max_cached_chunks()
        with self._lock:
            if chunk in self._kept or len(self._kept) < max_chunks:
                self._kept.pop(chunk, None)
                self._kept[chunk] = sealed

    def full(self) -> bool:
        """Whether it holds as many chunks as it may."""
        max_chunks = _max_cached_chunks()
        with self._lock:
            return len(self._kept) >= max_chunks

    def drop(self, chunk: int) -> None:
        """Hold this chunk no longer."""
        with self._lock:
            self._kept.pop(chunk, None)

    def drop_oldest(self) -> bool:
        """Give up the chunk that was wanted least lately; whether there was one."""
        with self._lock:
            if not self._kept:
                return False
            del self._kept[next(iter(self._kept))]
            return True

    def retain_only(self, etag: str) -> None:
        """Give up what is known to hold bytes that the image had once."""
        with self._lock:
            self._kept = {chunk: sealed for chunk, sealed in self._kept.items() if sealed.proven in ("", etag)}

    def exported(self, *, more: int) -> None:
        """One exporter more (1) or less (-1) gives these chunks; after the last one nobody needs them."""
        with self._lock:
            self._exports += more
            if not self._exports:
                self._kept.clear()

    def reader_closed(self) -> None:
        """Nothing is received any more; without an exporter nobody needs the chunks."""
        self.exported(more=0)

    def __len__(self) -> int:
        return len(self._kept)


def _max_cached_chunks() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CACHED_CHUNKS if soft == resource.RLIM_INFINITY else min(MAX_CACHED_CHUNKS, soft // DESCRIPTOR_DIVISOR)
