"""Parts of a multipart upload, and the bucket interface that an upload uses."""

from __future__ import annotations

import hashlib
import io
import mmap
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from rfork.settings import StorageSettings

MAX_PARTS: Final = 10_000
"""Maximum number of parts of an object."""
MIN_PART_BYTES: Final = 8 << 20
MAX_PART_BYTES: Final = 5 << 30
PARTS_PER_SIZE: Final = 1000
"""The part size doubles after this many parts: 8 MiB up to 8 GB, 64 MiB at 100 GB; 10,000 parts are 8 TB."""


def part_size(number: int) -> int:
    """Return the size in bytes of a part by its number (from 1). Only the last part of an object may be
    smaller.
    """
    return min(MIN_PART_BYTES << ((number - 1) // PARTS_PER_SIZE), MAX_PART_BYTES)


def buffers(size: int, settings: StorageSettings) -> int:
    """Return the number of parts of this size in memory: one that is filled, and those in flight."""
    return max(1, min(settings.concurrency + 1, settings.staging_bytes // size))


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """Metadata of an object."""

    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Part:
    """An uploaded part; `checksums` are sent back to complete the upload."""

    number: int
    etag: str
    checksums: Mapping[str, str]


class PartBody(io.RawIOBase):
    """Seekable request body for botocore, which restarts it for each attempt until it is cancelled."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0
        self._cancelled = threading.Event()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # botocore passes a memoryview
        """See `io.RawIOBase`."""
        count = min(len(buffer), len(self._data) - self._at)
        buffer[:count] = self._data[self._at : self._at + count]
        self._at += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.IOBase`. Raises OSError after `cancel`, so that no further attempt is made."""
        if self._cancelled.is_set():
            raise OSError("the upload was cancelled")
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = start + offset
        return self._at

    def cancel(self) -> None:
        """Prevent further attempts. Safe from any thread."""
        self._cancelled.set()


class MultipartBucket(Protocol):
    """Bucket operations for an upload. Thread-safe; raise StorageError subclasses, or SettingsError.

    With `only_new`, an existing object is kept: raises ConditionFailed, ConcurrentWriteConflict if another
    writer is creating it, or Unsupported if the service does not support the condition.
    """

    def put(self, key: str, body: PartBody, *, only_new: bool) -> None:
        """Write a complete object."""
        ...

    def begin(self, key: str) -> str:
        """Start a multipart upload and return its id."""
        ...

    def put_part(self, key: str, upload: str, number: int, body: PartBody) -> Part:
        """Upload one part; numbers start at 1."""
        ...

    def complete(self, key: str, upload: str, parts: Sequence[Part], *, only_new: bool) -> str:
        """Create an object from the parts and return its entity tag."""
        ...

    def abort(self, key: str, upload: str) -> None:
        """Remove an upload and its parts; does nothing if there is none."""
        ...

    def head(self, key: str) -> ObjectHead | None:
        """Return the object's metadata; None if it does not exist."""
        ...


class PartBuffer:
    """Memory of one part while it is filled (by one thread) and sent."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Anonymous memory, of which the kernel only allocates pages that are written: most blobs are small.
        self._memory = memoryview(mmap.mmap(-1, size))
        self._used = 0
        self._body: PartBody | None = None

    @property
    def remaining_bytes(self) -> int:
        """Free space in bytes."""
        return self.size - self._used

    def append(self, data: memoryview) -> int:
        """Append as much as fits, and return the number of bytes."""
        count = min(len(data), self.remaining_bytes)
        self._memory[self._used : self._used + count] = data[:count]
        self._used += count
        return count

    def body(self) -> PartBody:
        """Return a request body with the content."""
        self._body = PartBody(self._memory[: self._used])
        return self._body

    def cancel(self) -> None:
        """Prevent further attempts to send the content."""
        if self._body is not None:
            self._body.cancel()

    def clear(self) -> None:
        """Empty the buffer."""
        self._used, self._body = 0, None


def multipart_etag(parts: Sequence[Part]) -> str | None:
    """Return the entity tag of an object with these parts, if the service computes it with MD5 like AWS."""
    digests = [re.fullmatch(r'"?([0-9a-f]{32})"?', part.etag) for part in parts]
    if not all(digests):
        return None
    joined_digests = b"".join(bytes.fromhex(match.group(1)) for match in digests if match is not None)
    return f'"{hashlib.md5(joined_digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'
