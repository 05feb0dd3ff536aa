"""In-memory bucket of byte objects, with failures set by tests."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from rfork.errors import StorageCorrupt, StorageError, StorageNotFound
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import BlobEntry, BlobStore
from rfork.storage.location import Location

Fault = Callable[[str, str], None]
"""Called before each operation (open, read, write, commit, remove) with operation and path; may raise."""


class InMemoryBucket:
    """Objects by path. `log` records operations in order; `open_blobs` counts unclosed blobs."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.log: list[tuple[str, str]] = []
        self.open_blobs = 0
        self.fault: Fault | None = None
        self.lock = threading.Lock()

    def record(self, operation: str, path: str) -> None:
        """Record an operation, and raise the test's failure."""
        with self.lock:
            self.log.append((operation, path))
        if self.fault is not None:
            self.fault(operation, path)

    def paths_of(self, operation: str) -> list[str]:
        """Return the paths of all operations of one type."""
        return [path for logged_operation, path in self.log if logged_operation == operation]


class InMemoryBlob:
    """An object in the state in which it was opened; see `Blob`."""

    def __init__(self, bucket: InMemoryBucket, path: str, data: bytes) -> None:
        self.uri = f"s3://bucket/{path}"
        self.size = len(data)
        self.version = hashlib.md5(data).hexdigest()
        self._bucket = bucket
        self._path = path
        self._data = data
        self._closed = False
        with bucket.lock:
            bucket.open_blobs += 1

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        if self._closed:
            raise StorageError(f"{self.uri} is closed")
        self._bucket.record("read", self._path)
        for view in into:
            piece = self._data[offset : offset + view.nbytes]
            if len(piece) < view.nbytes:
                raise StorageCorrupt(f"{self.uri} ends at byte {self.size}")
            view[:] = piece
            offset += view.nbytes

    def close(self) -> None:
        with self._bucket.lock:
            self._bucket.open_blobs -= not self._closed
            self._closed = True


class InMemoryBlobWriter:
    """An object being written; see `BlobWriter`."""

    def __init__(self, bucket: InMemoryBucket, path: str) -> None:
        self.data = bytearray()
        self._bucket = bucket
        self._path = path

    def write(self, views: Sequence[memoryview]) -> None:
        self._bucket.record("write", self._path)
        for view in views:
            self.data += view


class InMemoryBlobStore:
    """All objects below a path of a bucket; see `BlobStore`."""

    def __init__(self, bucket: InMemoryBucket, folder: Location) -> None:
        self.uri = folder.uri
        self._bucket = bucket
        self._path = folder.path

    def open(self, name: str, *, front: int = 0) -> InMemoryBlob:
        path = self._path + name
        self._bucket.record("open", path)
        data = self._bucket.objects.get(path)
        if data is None:
            raise StorageNotFound(f"{self.uri}{name}: no such object")
        return InMemoryBlob(self._bucket, path, data)

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        for path, data in sorted(self._bucket.objects.items()):
            if path.startswith(self._path + prefix):
                yield BlobEntry(path.removeprefix(self._path), len(data))

    @contextmanager
    def write(self, name: str, *, replace: bool = True) -> Iterator[InMemoryBlobWriter]:
        path = self._path + name
        writer = InMemoryBlobWriter(self._bucket, path)
        yield writer
        self._bucket.record("commit", path)
        with self._bucket.lock:
            if replace or path not in self._bucket.objects:
                self._bucket.objects[path] = bytes(writer.data)

    def remove(self, name: str) -> None:
        self._bucket.record("remove", self._path + name)
        self._bucket.objects.pop(self._path + name, None)

    def close(self) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> InMemoryBucket:
    """Use a bucket for every s3:// URI."""
    made = InMemoryBucket()
    real = registry.open_store

    def open_store(folder: Location, settings: StorageSettings | None = None) -> BlobStore:
        return InMemoryBlobStore(made, folder) if folder.scheme == "s3" else real(folder, settings)

    monkeypatch.setattr(registry, "open_store", open_store)
    return made
