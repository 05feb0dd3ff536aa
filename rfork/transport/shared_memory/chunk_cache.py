"""Cache of an image's sealed chunks in a process: created by its exporter or received by its reader.

A relay serves the chunks that it has mapped, so that the bytes are in memory once.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Final

from rfork.transport.shared_memory.memfd import SealedChunk

MAX_CACHED_CHUNKS: Final = 512
"""Maximum number of chunks; each uses a descriptor."""
DESCRIPTOR_DIVISOR: Final = 4
"""At most 1/n of this process's descriptor limit is used."""
POLL_INTERVAL_S: Final = 0.5
"""Interval of keep-alive messages to a reader whose chunk another thread is creating."""


class SealedChunkCache:
    """Chunks by index. Thread-safe.

    A dropped chunk may still be mapped by targets, so recreating it would use memory for another copy.
    Therefore a full cache does not evict, and idle chunks are kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[int, SealedChunk] = {}
        self._build_locks: dict[int, threading.Lock] = {}
        self._exports = 0

    @contextlib.contextmanager
    def building(self, chunk: int, on_wait: Callable[[], None]) -> Iterator[None]:
        """Lock a chunk while it is looked up or created, so that it is created only once.

        `on_wait` is called every `POLL_INTERVAL_S` while another thread has the lock; it may raise to stop
        waiting.
        """
        with self._lock:
            lock = self._build_locks.setdefault(chunk, threading.Lock())
        while not lock.acquire(timeout=POLL_INTERVAL_S):
            on_wait()
        try:
            yield
        finally:
            lock.release()

    def find(self, chunk: int) -> SealedChunk | None:
        """Return the chunk if it is cached."""
        with self._lock:
            # Reinsert it, so that the first chunk is the least recently used.
            sealed = self._chunks.pop(chunk, None)
            if sealed is not None:
                self._chunks[chunk] = sealed
            return sealed

    def put(self, chunk: int, sealed: SealedChunk) -> None:
        """Cache a chunk, replacing an earlier one; does nothing if the cache is full."""
        max_chunks = _max_cached_chunks()
        with self._lock:
            if chunk in self._chunks or len(self._chunks) < max_chunks:
                self._chunks.pop(chunk, None)
                self._chunks[chunk] = sealed

    def is_full(self) -> bool:
        """Return True if the cache is full."""
        max_chunks = _max_cached_chunks()
        with self._lock:
            return len(self._chunks) >= max_chunks

    def drop(self, chunk: int) -> None:
        """Remove the chunk."""
        with self._lock:
            self._chunks.pop(chunk, None)

    def drop_oldest(self) -> bool:
        """Remove the least recently used chunk; return False if the cache is empty."""
        with self._lock:
            if not self._chunks:
                return False
            del self._chunks[next(iter(self._chunks))]
            return True

    def retain_only(self, etag: str) -> None:
        """Remove chunks known to contain bytes of an earlier version."""
        with self._lock:
            self._chunks = {
                chunk: sealed for chunk, sealed in self._chunks.items() if sealed.verified_etag in ("", etag)
            }

    def change_exporters(self, *, more: int) -> None:
        """Add (1) or remove (-1) an exporter; clear the cache after the last one."""
        with self._lock:
            self._exports += more
            if not self._exports:
                self._chunks.clear()

    def reader_closed(self) -> None:
        """Handle the end of receiving: without an exporter the chunks are not needed any more."""
        self.change_exporters(more=0)

    def __len__(self) -> int:
        return len(self._chunks)


def _max_cached_chunks() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CACHED_CHUNKS if soft == resource.RLIM_INFINITY else min(MAX_CACHED_CHUNKS, soft // DESCRIPTOR_DIVISOR)
