"""The storage seam: files that hold an image, or what it is made of, read chunk by chunk.

Runs on the target. The fork decides which chunks are read from where; a storage only turns a range of
the image into reads of its files. What it gives is checked like what a peer gives: against the
manifest where one is known, else its digests become those of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rfork.image.manifest import Manifest
from rfork.schema import StorageCandidate
from rfork.schema.types import StorageKind


class ImageStorage(Protocol):
    """One image in storage, any range of which can be read; thread-safe."""

    @property
    def storage_kind(self) -> StorageKind:
        """``snapshot`` or ``checkpoint``."""
        ...

    @property
    def uri(self) -> str:
        """Where it lies, as ``file:///…``."""
        ...

    @property
    def origin(self) -> str | None:
        """What tells its bytes from others before any chunk is read, as 32 hex digits."""
        ...

    @property
    def manifest(self) -> Manifest | None:
        """What it holds, where that is known before it is read: of a snapshot."""
        ...

    def read(self, begin: int, end: int, into: Sequence[memoryview]) -> None:
        """Fill `into`, host views of `end - begin` bytes in all, with image range `[begin, end)`.

        Raises StorageError when a file cannot be read, is too short, or changed since it was opened.
        """
        ...

    def close(self) -> None:
        """Close the files; no read is under way any more."""
        ...


def storage_name(storage_type: StorageKind, uri: str) -> str:
    """The word for a storage in reports: ``KIND:URI``."""
    return f"{storage_type}:{uri}"


def to_candidate(storage: ImageStorage) -> StorageCandidate:
    """What the planner is told of a storage."""
    manifest = storage.manifest
    return StorageCandidate(
        kind=storage.storage_kind,
        uri=storage.uri,
        origin=storage.origin,
        weights_id=manifest.weights_id if manifest is not None else None,
    )
