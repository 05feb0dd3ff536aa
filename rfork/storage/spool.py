"""The spool: a fork's verified chunks in one file, for a process that comes back. Runs on the target.

::

    header    4096 bytes: magic, layout_id, image size, chunk size, a checksum
    records   32 bytes a chunk: its index, the digest of its bytes, a checksum; zeros where it is not here
    data      from the next multiple of 4096 on: the image, with holes where chunks are missing

One file, so that data and records cannot be of two forks; a record has its own place, so that a torn one
costs its chunk alone. Data is written before its record, and a record is erased before its data changes.
Nothing is synced: what was written outlives a process that is killed. What a machine that crashes loses,
or somebody else changes, shows when the bytes are digested: a record says where to look, and proves
nothing. The file is never mapped, as whoever cuts it short would end the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from rfork.image.chunks import Chunks
from rfork.image.layout import Layout
from rfork.storage.local.linux import MAX_IOVECS

MAGIC = b"rfork-spool-v1\n\0"
HASH_DOMAIN = b"rfork-spool-v1"
PAGE = 4096
HEADER = struct.Struct("<16s32sQQ16s")
RECORD = struct.Struct("<I16s12s")
AHEAD = 2
"""Reads of the same size that the kernel is asked for beforehand."""


class Spool:
    """One spool, open and locked. Thread-safe; all but `close` raise OSError where the file fails."""

    def __init__(self, path: Path, descriptor: int, layout: Layout) -> None:
        """Takes over a locked descriptor. The file is of this layout, or still empty."""
        self.path = path
        self._descriptor = descriptor
        self._layout_id = layout.layout_id.encode()
        self._chunks = layout.chunks
        self._data_at = PAGE + -(-len(self._chunks) * RECORD.size // PAGE) * PAGE
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._records = self._read_records()

    @property
    def records(self) -> dict[int, bytes]:
        """The digests that chunks had when they were written, by index."""
        with self._lock:
            return dict(self._records)

    def has_space(self) -> bool:
        """Whether the file system has room for what is not written yet."""
        with self._open() as descriptor:
            free = os.fstatvfs(descriptor)
            used_bytes = os.fstat(descriptor).st_blocks * 512
        return used_bytes + free.f_bavail * free.f_frsize >= self._data_at + self._chunks.image_bytes

    def read(self, at: int, into: memoryview) -> bool:
        """Fill `into` with the image's bytes from offset `at` on; whether the file has them all.

        What follows is read ahead, while the caller does something with these.
        """
        with self._open() as descriptor:
            if sys.platform == "linux":
                ahead = self._data_at + at + into.nbytes
                os.posix_fadvise(descriptor, ahead, AHEAD * into.nbytes, os.POSIX_FADV_WILLNEED)
            while into.nbytes:
                count = os.preadv(descriptor, [into], self._data_at + at)
                if count == 0:
                    return False
                at, into = at + count, into[count:]
        return True

    def write(self, at: int, views: Sequence[memoryview]) -> None:
        """Put the image's bytes from offset `at` on. Their chunk must have no record."""
        waiting = [view for view in views if view.nbytes][::-1]
        with self._open() as descriptor:
            while waiting:
                count = os.pwritev(descriptor, waiting[: -MAX_IOVECS - 1 : -1], self._data_at + at)
                at += count
                while waiting and count >= waiting[-1].nbytes:
                    count -= waiting.pop().nbytes
                if count:
                    waiting[-1] = waiting[-1][count:]

    def record(self, chunk: int, digest: bytes) -> None:
        """Say that all bytes of a chunk are written, and have this digest."""
        self._write_record(chunk, RECORD.pack(chunk, digest, self._checksum(chunk, digest)))
        with self._lock:
            self._records[chunk] = digest

    def erase(self, chunk: int) -> None:
        """Say that a chunk is not here."""
        with self._lock:
            known = self._records.pop(chunk, None) is not None
        if known:
            self._write_record(chunk, bytes(RECORD.size))

    def remove(self) -> None:
        """Take the file out of its folder; its space is free once it is closed."""
        with self._open() as descriptor, contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(self.path)):
                os.unlink(self.path)

    def close(self) -> None:
        """Give up the lock. A read or write under way ends first; its thread then closes the file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = not self._users
        if last:
            release(self._descriptor)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise OSError(f"{self.path} is closed")
            self._users += 1
        try:
            yield self._descriptor
        finally:
            self._unlock()

    def _unlock(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            release(self._descriptor)

    def _write_record(self, chunk: int, record: bytes) -> None:
        with self._open() as descriptor:
            write_all(descriptor, record, PAGE + chunk * RECORD.size)

    def _read_records(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        table = os.pread(self._descriptor, len(self._chunks) * RECORD.size, PAGE)
        table = table[: len(table) // RECORD.size * RECORD.size]
        for index, (chunk, digest, checksum) in enumerate(RECORD.iter_unpack(table)):
            if chunk == index and checksum == self._checksum(chunk, digest):
                found[chunk] = digest
        return found

    def _checksum(self, chunk: int, digest: bytes) -> bytes:
        record_key = self._layout_id + chunk.to_bytes(4, "little") + digest
        return hashlib.blake2b(record_key, digest_size=12, person=HASH_DOMAIN).digest()


def header_of(layout_id: str, chunks: Chunks) -> bytes:
    """What the file of a spool of this layout begins with."""
    values = (MAGIC, layout_id.encode(), chunks.image_bytes, chunks.chunk_size)
    checksum = hashlib.blake2b(repr(values).encode(), digest_size=16, person=HASH_DOMAIN).digest()
    return HEADER.pack(*values, checksum)


def write_all(descriptor: int, data: bytes, at: int) -> None:
    """Put bytes at an offset of a file. Raises OSError."""
    while data:
        count = os.pwrite(descriptor, data, at)
        at, data = at + count, data[count:]


def release(descriptor: int) -> None:
    """Unlock and close: a child that inherited the descriptor must not keep the lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
