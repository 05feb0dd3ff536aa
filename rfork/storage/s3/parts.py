"""The parts that an upload to an object store is made of, and what it asks of the bucket."""

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
"""Most parts of one object."""
MIN_PART_BYTES: Final = 8 << 20
MAX_PART_BYTES: Final = 5 << 30
GROWTH: Final = 1000
"""After so many parts they are twice as large: 8 MiB up to 8 GB, 64 MiB at 100 GB, and 10,000 hold 8 TB."""


def part_size(number: int) -> int:
    """Bytes of the part of this number; the first is 1. All but the last of an object are so large."""
    return min(MIN_PART_BYTES << ((number - 1) // GROWTH), MAX_PART_BYTES)


def buffers(size: int, settings: StorageSettings) -> int:
    """Parts of a size that may be in memory at once: one that fills, and those in flight."""
    return max(1, min(settings.concurrency + 1, settings.staging_bytes // size))


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """What a bucket says of an object."""

    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an upload that the bucket has; `checksums` as it wants to see them again."""

    number: int
    etag: str
    checksums: Mapping[str, str]


class PartBody(io.RawIOBase):
    """Memory as botocore sends it: from its start again for each attempt, until it is given up."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0
        self._cancelled = threading.Event()

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # botocore gives no other
        """As of any file."""
        count = min(len(buffer), len(self._data) - self._at)
        buffer[:count] = self._data[self._at : self._at + count]
        self._at += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file. Raises OSError once it was given up, so that no further attempt is made."""
        if self._cancelled.is_set():
            raise OSError("the upload was given up")
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = start + offset
        return self._at

    def cancel(self) -> None:
        """Have the attempt under way be the last. Safe from any thread."""
        self._cancelled.set()


class MultipartBucket(Protocol):
    """What an upload needs of a bucket. Thread-safe; raises StorageError kinds, or SettingsError.

    With `only_new` an object that is there by then stays as it is: ConditionFailed, Conflict where another
    is just being written, Unsupported where the service cannot tell.
    """

    def put(self, key: str, body: PartBody, *, only_new: bool) -> None:
        """Write a whole object."""
        ...

    def begin(self, key: str) -> str:
        """Begin an upload in parts: its id."""
        ...

    def put_part(self, key: str, upload: str, number: int, body: PartBody) -> Part:
        """Upload one part; the first is 1."""
        ...

    def complete(self, key: str, upload: str, parts: Sequence[Part], *, only_new: bool) -> str:
        """Make an object of the parts: its entity tag."""
        ...

    def abort(self, key: str, upload: str) -> None:
        """Remove an upload and its parts; nothing happens where there is none."""
        ...

    def head(self, key: str) -> ObjectHead | None:
        """What is there under this key."""
        ...


class PartBuffer:
    """Memory of one part, while it fills and while it is sent; filled by one thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Of the kernel's, which gives pages only as they are written to: most blobs are small.
        self._memory = memoryview(mmap.mmap(-1, size))
        self._used = 0
        self._body: PartBody | None = None

    @property
    def remaining_bytes(self) -> int:
        """Bytes it still takes."""
        return self.size - self._used

    def append(self, data: memoryview) -> int:
        """Take as much as there is room for: how many bytes."""
        count = min(len(data), self.remaining_bytes)
        self._memory[self._used : self._used + count] = data[:count]
        self._used += count
        return count

    def body(self) -> PartBody:
        """What it holds, to be sent."""
        self._body = PartBody(self._memory[: self._used])
        return self._body

    def cancel(self) -> None:
        """Have it be sent no more often than it is now."""
        if self._body is not None:
            self._body.cancel()

    def clear(self) -> None:
        """Make it empty."""
        self._used, self._body = 0, None


def multipart_etag(parts: Sequence[Part]) -> str | None:
    """The entity tag of an object of these parts, where the service makes it of MD5 as AWS does."""
    digests = [re.fullmatch(r'"?([0-9a-f]{32})"?', part.etag) for part in parts]
    if not all(digests):
        return None
    joined_digests = b"".join(bytes.fromhex(match.group(1)) for match in digests if match is not None)
    return f'"{hashlib.md5(joined_digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'
