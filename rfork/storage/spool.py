"""The spool: a fork's verified chunks in one file, for a process that restarts. Runs on the target.

::

    header    4096 bytes: magic, layout_id, image size, chunk size, a checksum
    records   32 bytes a chunk: its index, the digest of its bytes, a checksum; zeros if the chunk is missing
    data      from the next multiple of 4096: the image, with holes where chunks are missing

A single file guarantees that data and records belong to the same fork. Each record has a fixed position, so a
torn record costs only its chunk. Data is written before its record, and a record is erased before its data
changes. Nothing is synced: written data survives a killed process. Data lost in a machine crash, or changed
by another process, is detected when the bytes are digested: a record is only a hint. The file is never
mapped, because a process that truncates it would crash this one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rfork.errors import StorageError
from rfork.image.chunks import Chunks
from rfork.image.layout import Layout
from rfork.storage.direct_io import MAX_IOVECS

MAGIC = b"rfork-spool-v1\n\0"
HASH_DOMAIN = b"rfork-spool-v1"
PAGE = 4096
HEADER = struct.Struct("<16s32sQQ16s")
RECORD = struct.Struct("<I16s12s")
PREFETCH_READS = 2
"""Reads of the same size that the kernel prefetches."""

MAX_SPOOLS = 16
"""Maximum number of processes with the same rank and model that may have spools in one folder."""
TTL_S = 3 * 86400.0
"""A spool that was not resumed within this time is removed by the next fork of the same name."""


class Spool:
    """One open and locked spool. Thread-safe; all methods but `close` raise OSError if the file fails."""

    def __init__(self, path: Path, descriptor: int, layout: Layout) -> None:
        """Take ownership of a locked descriptor. The file has this layout, or is still empty."""
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
        """Digests of the stored chunks when they were written, by chunk index."""
        with self._lock:
            return dict(self._records)

    def has_space(self) -> bool:
        """Return True if the file system has enough free space for the missing chunks."""
        with self._open() as descriptor:
            free = os.fstatvfs(descriptor)
            used_bytes = os.fstat(descriptor).st_blocks * 512
        return used_bytes + free.f_bavail * free.f_frsize >= self._data_at + self._chunks.image_bytes

    def read(self, offset: int, into: memoryview) -> bool:
        """Fill `into` with the image bytes from `offset`; return False if the file ends before.

        The following bytes are prefetched while the caller processes these.
        """
        with self._open() as descriptor:
            if sys.platform == "linux":
                ahead = self._data_at + offset + into.nbytes
                os.posix_fadvise(descriptor, ahead, PREFETCH_READS * into.nbytes, os.POSIX_FADV_WILLNEED)
            while into.nbytes:
                count = os.preadv(descriptor, [into], self._data_at + offset)
                if count == 0:
                    return False
                offset, into = offset + count, into[count:]
        return True

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write image bytes at `offset`. Their chunk must not have a record."""
        remaining = [view for view in views if view.nbytes][::-1]
        with self._open() as descriptor:
            while remaining:
                count = os.pwritev(descriptor, remaining[: -MAX_IOVECS - 1 : -1], self._data_at + offset)
                offset += count
                while remaining and count >= remaining[-1].nbytes:
                    count -= remaining.pop().nbytes
                if count:
                    remaining[-1] = remaining[-1][count:]

    def record(self, chunk: int, digest: bytes) -> None:
        """Record that all bytes of a chunk are written and have this digest."""
        self._write_record(chunk, RECORD.pack(chunk, digest, self._checksum(chunk, digest)))
        with self._lock:
            self._records[chunk] = digest

    def erase(self, chunk: int) -> None:
        """Erase the record of a chunk."""
        with self._lock:
            known = self._records.pop(chunk, None) is not None
        if known:
            self._write_record(chunk, bytes(RECORD.size))

    def remove(self) -> None:
        """Unlink the file; its space is freed when it is closed."""
        with self._open() as descriptor, contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(self.path)):
                os.unlink(self.path)

    def close(self) -> None:
        """Release the lock. If a read or write is in progress, its thread closes the file when it ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            is_last = not self._users
        if is_last:
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
            is_last = self._closed and not self._users
        if is_last:
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
    """Return the header of a spool file for this layout."""
    values = (MAGIC, layout_id.encode(), chunks.image_bytes, chunks.chunk_size)
    checksum = hashlib.blake2b(repr(values).encode(), digest_size=16, person=HASH_DOMAIN).digest()
    return HEADER.pack(*values, checksum)


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write bytes at an offset of a file. Raises OSError."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        offset, data = offset + count, data[count:]


def release(descriptor: int) -> None:
    """Unlock and close, so that a child process that inherited the descriptor does not keep the lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def acquire_spool(folder: Path, name: str, layout: Layout) -> Spool:
    """Return the spool that a terminated process of this name left, or a new one.

    Concurrent processes get separate spools. Spools of another layout, and expired ones, are removed. Raises
    StorageError if no spool is available: the folder is missing or not writable, all spools are in use, or a
    file in its place does not belong to this user.
    """
    paths = [folder / f"{name}.{number}.partial" for number in range(MAX_SPOOLS)]
    try:
        for attempt in (_open_existing, _create):
            for path in paths:
                spool = attempt(path, layout)
                if spool is not None:
                    _remove_expired([other for other in paths if other != path], layout)
                    return spool
    except OSError as error:
        raise StorageError(f"{error.filename or folder}: {error.strerror or error}") from None
    raise StorageError(f"{folder}: {MAX_SPOOLS} processes already keep chunks of {name} here")


def _remove_expired(paths: Sequence[Path], layout: Layout) -> None:
    """Remove expired spools. Best effort: the next fork of this name tries again."""
    for path in paths:
        with contextlib.suppress(OSError, StorageError):
            if time.time() - os.lstat(path).st_mtime > TTL_S:
                expired = _open_existing(path, layout)
                if expired is not None:
                    expired.remove()
                    expired.close()


def _open_existing(path: Path, layout: Layout) -> Spool | None:
    """Return the spool at this path unless another process has locked it. Removes one of another layout."""
    try:
        descriptor = _locked(path, 0)
    except FileNotFoundError:
        return None
    if descriptor is None:
        return None
    try:
        fits = os.pread(descriptor, HEADER.size, 0) == header_of(layout.layout_id, layout.chunks)
        spool = Spool(path, descriptor, layout)
    except BaseException:
        release(descriptor)
        raise
    if fits:
        return spool
    spool.remove()
    spool.close()
    return None


def _create(path: Path, layout: Layout) -> Spool | None:
    """Create a spool at this path; return None if the file already exists."""
    try:
        descriptor = _locked(path, os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return None
    if descriptor is None:  # another process locked it before its header was written
        return None
    try:
        write_all(descriptor, header_of(layout.layout_id, layout.chunks), 0)
        return Spool(path, descriptor, layout)
    except BaseException:
        release(descriptor)
        raise


def _locked(path: Path, extra_flags: int) -> int | None:
    """Open and lock a file. Returns None if another process has locked it; raises StorageError if it is not
    this user's.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | extra_flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StorageError(f"{path}: not a regular file that only this user can access")
        if status.st_nlink > 1:
            raise StorageError(f"{path}: has a second hard link")
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        release(descriptor)
        raise
    if not status.st_nlink:  # its process just finished and removed it
        release(descriptor)
        return None
    return descriptor
