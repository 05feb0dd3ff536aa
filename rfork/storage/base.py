"""Storage interface: files that contain an image, or the tensors to build it, read chunk by chunk.

Runs on the target. The fork decides which chunks are read from which source; a storage only translates an
image range into reads of its files. Its bytes are verified like those of a peer: against the manifest if
there is one, otherwise their digests become a provisional manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rfork.image.layout import Manifest
from rfork.schema import StorageCandidate, StorageType


class RangeReader(Protocol):
    """Bytes that can be read in arbitrary ranges. Thread-safe."""

    def read(self, begin: int, end: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with the range `[begin, end)`; its host views have `end - begin` bytes in total.

        Raises StorageError if a file cannot be read, is too short, or has changed since it was opened.
        """
        ...


class ImageStorage(RangeReader, Protocol):
    """One image in storage; `read` takes ranges of the image."""

    @property
    def storage_type(self) -> StorageType:
        """``snapshot`` or ``checkpoint``."""
        ...

    @property
    def uri(self) -> str:
        """Location, as ``file:///…``."""
        ...

    @property
    def origin(self) -> str | None:
        """Identifier of the stored bytes, known before any chunk is read: 32 hex digits."""
        ...

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the image, if it is known before reading: only for a snapshot."""
        ...

    def close(self) -> None:
        """Close the files. Call only when no read is in progress."""
        ...


def storage_name(storage_type: StorageType, uri: str) -> str:
    """Return the name of a storage for reports: ``TYPE:URI``."""
    return f"{storage_type}:{uri}"


def to_candidate(storage: ImageStorage) -> StorageCandidate:
    """Return the description of a storage that is sent to the planner."""
    manifest = storage.manifest
    return StorageCandidate(
        kind=storage.storage_type,
        uri=storage.uri,
        origin=storage.origin,
        weights_id=manifest.weights_id if manifest is not None else None,
    )
