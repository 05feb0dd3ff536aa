"""Blob interface: named bytes, read by position, in any type of storage.

Runs wherever weights are read or written. A `Blob` is one file or object; a `BlobStore` is the folder, bucket
or server that contains it. `rfork.storage.registry` selects the implementation for a URI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Final, Protocol

from rfork.errors import StorageNotFound

HEAD_BYTES: Final = 128 << 10
"""Bytes to fetch first from a file with a header: enough for most headers and most small files."""


class ViewCursor:
    """Sequence of views that is consumed from the front, any number of bytes at a time."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._used = 0

    def next_views(self, count: int) -> list[memoryview]:
        """Consume and return views of the next `count` bytes."""
        result: list[memoryview] = []
        while count > 0:
            view = self._views[self._index]
            piece = view[self._used : self._used + count]
            result.append(piece)
            count -= piece.nbytes
            self._used += piece.nbytes
            if self._used == view.nbytes:
                self._index, self._used = self._index + 1, 0
        return result


class Blob(Protocol):
    """One open file or object. Every read returns the content as of opening. Thread-safe."""

    @property
    def uri(self) -> str:
        """Location."""
        ...

    @property
    def size(self) -> int:
        """Size in bytes when it was opened."""
        ...

    @property
    def version(self) -> str | None:
        """Version identifier (such as an ETag) of these bytes; None if the store has none."""
        ...

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views (host memory, in order) with the bytes from `offset`, using one or a few requests.

        Retries transient failures. Raises StorageChanged if the blob was replaced, and StorageError
        subclasses if it cannot be read, is too short, or was closed. The content of `into` is then undefined.
        """
        ...

    def close(self) -> None:
        """Release resources, immediately or when the last read in progress ends."""
        ...


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """A blob in a store listing; `name` is relative to the store, with ``/`` as separator."""

    name: str
    size: int


class BlobWriter(Protocol):
    """Writer of one blob, which becomes visible only on commit. Not thread-safe."""

    def write(self, views: Sequence[memoryview]) -> None:
        """Append bytes; the views may be reused after the call. Raises StorageError subclasses."""
        ...


class BlobStore(Protocol):
    """A collection of named blobs: a folder, a bucket prefix or a web server. Thread-safe.

    Every method may raise StorageNotFound, StorageAccessDenied or another StorageError; `write` and `remove`
    raise SettingsError if the storage is read-only.
    """

    @property
    def uri(self) -> str:
        """Location; ends with ``/``."""
        ...

    def open(self, name: str, *, front: int = 0) -> Blob:
        """Open a blob by name. `front`: number of leading bytes that the reader will need right away.

        If opening costs a round trip, these bytes are fetched in the same response.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        """Iterate over all blobs whose names begin with `prefix`, recursively, sorted by name."""
        ...

    def write(self, name: str, *, replace: bool = True) -> AbstractContextManager[BlobWriter]:
        """Create a blob. It appears atomically when the block ends without an exception, otherwise not at
        all.

        With `replace=False`, an existing blob is silently kept: for content-addressed names.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a blob; does nothing if it does not exist."""
        ...

    def close(self) -> None:
        """Close connections; open blobs stay usable."""
        ...


def read_range(blob: Blob, offset: int, length: int) -> bytes:
    """Return `length` bytes of a blob from `offset`. Raises the same errors as `Blob.read`."""
    data = bytearray(length)
    blob.read(offset, [memoryview(data)])
    return bytes(data)


def size_of(store: BlobStore, name: str) -> int | None:
    """Return the size of a blob in bytes, or None if it does not exist. Raises the same errors as `BlobStore.open`."""
    try:
        with closing(store.open(name)) as blob:
            return blob.size
    except StorageNotFound:
        return None
