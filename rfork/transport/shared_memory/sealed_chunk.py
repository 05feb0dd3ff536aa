"""Chunks in sealed memory files: created on the source, validated on the target, cached on both.

A sealed file can no longer be changed by any process, so verified bytes stay valid and a mapping needs no
fence. A relay serves the chunks that it has mapped, so that the bytes are in memory once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rfork.errors import SourceCorrupt
from rfork.image.memory import Image
from rfork.transport.same_host import memory_file
from rfork.transport.same_host.memory_file import Descriptor, split
from rfork.transport.shared_memory.file_layout import FileLayout

MAX_CACHED_CHUNKS: Final = 512
"""Maximum number of chunks; each uses a descriptor."""
DESCRIPTOR_DIVISOR: Final = 4
"""At most 1/n of this process's descriptor limit is used."""
POLL_INTERVAL_S: Final = 0.5
"""Interval of keep-alive messages to a reader whose chunk another thread is creating."""
# From <linux/fcntl.h>; Python defines them only on Linux.
_ADD_SEALS: Final = 1033
_GET_SEALS: Final = 1034
_SEAL_SEAL: Final = 1
_IMMUTABLE: Final = 2 | 4 | 8
"""Seals against shrinking, growing and writing."""
_memcmp = ctypes.CDLL(None).memcmp  # releases the GIL
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def write(file: Descriptor, layout: FileLayout, begin: int, views: Sequence[memoryview]) -> None:
    """Write image bytes from offset `begin` on to their places in the file. Raises OSError."""
    for file_offset, part in _split_by_run(layout, begin, views):
        memory_file.write(file.number, file_offset, part)


class SealedChunk:
    """A range of an image in a sealed memory file."""

    def __init__(self, descriptor: Descriptor, layout: FileLayout) -> None:
        self.descriptor = descriptor
        self.layout = layout
        self.verified_etag = ""
        """Etag of the source for which the bytes are known to equal the image; empty if unknown."""
        self.backs_image = False
        """True if its pages are the image's own: to drop it would free no memory."""

    @classmethod
    def create(cls, descriptor: Descriptor, layout: FileLayout) -> SealedChunk:
        """Seal a file that contains a range of the image. Raises OSError."""
        fcntl.fcntl(descriptor.number, _ADD_SEALS, _IMMUTABLE | _SEAL_SEAL)
        return cls(descriptor, layout)

    @classmethod
    def from_fd(cls, descriptor: Descriptor, layout: FileLayout) -> SealedChunk:
        """Wrap a received descriptor. Raises SourceCorrupt if the file is not sealed or too short."""
        try:
            seals = fcntl.fcntl(descriptor.number, _GET_SEALS)
            size = os.fstat(descriptor.number).st_size
        except OSError:
            raise SourceCorrupt("the source sent a descriptor that is not a memory file") from None
        if seals & _IMMUTABLE != _IMMUTABLE or size < layout.size:
            raise SourceCorrupt("the source sent a memory file that is not sealed or too short")
        return cls(descriptor, layout)

    def content_equals(self, image: Image, begin: int, end: int) -> bool:
        """Return True if `[begin, end)`, a part of this range, has the same bytes as the image. Raises
        OSError.
        """
        mapping = mmap.mmap(self.descriptor.number, self.layout.size, mmap.MAP_PRIVATE)
        with contextlib.closing(mapping), image.readable(begin, end) as views:
            address = _address(memoryview(mapping))
            for file_offset, part in _split_by_run(self.layout, begin, views):
                for view in part:
                    if _memcmp(address + file_offset, _address(view), view.nbytes):
                        return False
                    file_offset += view.nbytes
        return True


def _split_by_run(
    layout: FileLayout, begin: int, views: Sequence[memoryview]
) -> Iterator[tuple[int, Sequence[memoryview]]]:
    """Split image bytes from offset `begin` on into the runs of their file; yield each with its file offset."""
    rest = list(views)
    for run in layout.runs(begin, begin + sum(view.nbytes for view in views)):
        part, rest = split(rest, run.length)
        yield run.file_offset, part


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


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
        """Remove the least recently used chunk whose memory that may free; return False if there is none."""
        with self._lock:
            chunk = next((chunk for chunk, sealed in self._chunks.items() if not sealed.backs_image), None)
            if chunk is None:
                return False
            del self._chunks[chunk]
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
