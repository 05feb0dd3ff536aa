"""The seam below the formats: bytes by name, read by position, in whatever kind of storage.

Runs wherever weights are read or written. A `Blob` is one file or object; a `BlobStore` is the folder, bucket
or server that it lies in. What kind a URI names is decided in `rfork.storage.registry`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol


class Blob(Protocol):
    """One file or object, held so that every read is of what was there when it was opened. Thread-safe."""

    @property
    def uri(self) -> str:
        """Where it lies."""
        ...

    @property
    def size(self) -> int:
        """Bytes it had when it was opened."""
        ...

    @property
    def version(self) -> str | None:
        """What tells these bytes from others under the same name (an ETag); None where nothing does."""
        ...

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views (host memory, in order) with the bytes from `offset` on: one request, or a few.

        Retries by itself what may pass. Raises StorageChanged when it was replaced, and StorageError kinds
        when it cannot be read, ends before, or was closed. What was filled by then is undefined.
        """
        ...

    def close(self) -> None:
        """Give up what it holds: at once, or with the end of the last read that is under way."""
        ...


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """A blob as its store lists it; `name` is relative to the store, with ``/`` between its parts."""

    name: str
    size: int


class BlobWriter(Protocol):
    """A blob in the making; nobody sees it before `commit`. For one thread."""

    def write(self, views: Sequence[memoryview]) -> None:
        """Append bytes; they may change once this returns. Raises StorageError kinds."""
        ...


class BlobStore(Protocol):
    """Where blobs lie by name: a folder, a bucket's prefix, a web server. Thread-safe.

    Every method raises StorageNotFound, StorageAccessDenied or other StorageErrors; `write` and `remove` raise
    SettingsError where the kind of storage can only be read.
    """

    @property
    def uri(self) -> str:
        """Where it is; ends with ``/``."""
        ...

    def open(self, name: str, *, front: int = 0) -> Blob:
        """The blob of that name; of its first `front` bytes the reader will want some at once.

        Where asking costs a round trip, they come with the answer that opens it.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        """Every blob whose name begins with `prefix`, in all folders below, in the order of names."""
        ...

    def write(self, name: str, *, replace: bool = True) -> AbstractContextManager[BlobWriter]:
        """A new blob: it is there, whole, once the block is left without an exception, and not at all else.

        With `replace` False a blob that is there by then is left as it is, silently: for names that say
        what the bytes are.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a blob; nothing happens where there is none."""
        ...

    def close(self) -> None:
        """Drop connections; blobs that are open stay so."""
        ...


HEAD_BYTES: Final = 128 << 10
"""What is wanted at once of a file with a header: most headers, and most small files, are no longer."""


def read_range(blob: Blob, offset: int, length: int) -> bytes:
    """`length` bytes of a blob from `offset` on; raises as `Blob.read` does."""
    data = bytearray(length)
    blob.read(offset, [memoryview(data)])
    return bytes(data)
