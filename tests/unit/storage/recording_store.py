"""Blobs in memory that record the ranges read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from rfork.errors import RforkError, StorageError, StorageNotFound
from rfork.storage.blob import BlobEntry, BlobWriter


class RecordingBlob:
    """Bytes under a URI; `read_ranges` are the requested ranges, and reads fail from `broken_from`."""

    def __init__(self, uri: str, data: bytes, broken_from: int | None = None) -> None:
        self.uri = uri
        self.size = len(data)
        self.version: str | None = None
        self.read_ranges: list[tuple[int, int]] = []
        self.closed = False
        self._data = data
        self._broken_from = broken_from
        self._lock = threading.Lock()

    @property
    def read_bytes(self) -> int:
        return sum(end - begin for begin, end in self.read_ranges)

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        end = offset + sum(view.nbytes for view in into)
        with self._lock:
            if self.closed:
                raise StorageError(f"{self.uri} is closed")
            self.read_ranges.append((offset, end))
        if end > self.size or (self._broken_from is not None and end > self._broken_from):
            raise StorageError(f"{self.uri} ends before byte {end}")
        for view in into:
            view[:] = self._data[offset : offset + view.nbytes]
            offset += view.nbytes

    def close(self) -> None:
        self.closed = True


class RecordingStore:
    """Blobs by name. A store that cannot list, like a web server, raises `unlisted`."""

    def __init__(self, uri: str, files: Mapping[str, bytes], unlisted: RforkError | None = None) -> None:
        self.uri = uri
        self.files = dict(files)
        self.blobs: list[RecordingBlob] = []
        self._unlisted = unlisted

    def open(self, name: str, *, front: int = 0) -> RecordingBlob:
        if name not in self.files:
            raise StorageNotFound(f"{self.uri}{name} does not exist")
        blob = RecordingBlob(self.uri + name, self.files[name])
        self.blobs.append(blob)
        return blob

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        if self._unlisted is not None:
            raise self._unlisted
        return (BlobEntry(name, len(data)) for name, data in sorted(self.files.items()) if name.startswith(prefix))

    def write(self, name: str, *, replace: bool = True) -> AbstractContextManager[BlobWriter]:
        raise NotImplementedError

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def close(self) -> None:
        pass
