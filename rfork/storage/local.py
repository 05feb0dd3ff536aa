"""Local files as blobs, and a local folder as a store."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rfork.errors import SettingsError, StorageChanged, StorageError
from rfork.image.staging import BufferPool
from rfork.settings import StorageSettings
from rfork.storage.blob import BlobEntry
from rfork.storage.direct_io import MAX_IOVECS, DirectFile, EndOfFile
from rfork.storage.location import Location
from rfork.storage.os_errors import storage_error

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
"""Names of files that are being written, or whose writer was killed."""


def commit_file(descriptor: int, temporary: Path, path: Path, *, replace: bool) -> None:
    """Sync a complete file and rename it to its final name. Raises StorageError subclasses."""
    try:
        os.fsync(descriptor)
        if replace:
            temporary.replace(path)
        else:
            _rename_no_replace(temporary, path)
        _fsync_dir(path.parent)
    except OSError as error:
        raise storage_error(path, error) from None


def _rename_no_replace(temporary: Path, path: Path) -> None:
    """Rename a file unless the name is already in use."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as error:
        # A file system without hard links: a concurrent writer writes the same bytes.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        if not path.exists():
            temporary.replace(path)


def _fsync_dir(folder: Path) -> None:
    """Sync the folder, so that its new names are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support fsync on folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class LocalFile:
    """An open local file, so that every read returns the original content; see `Blob`."""

    def __init__(self, path: Path, settings: StorageSettings, staging: BufferPool | None = None) -> None:
        """Files of one store share `staging`; without it, the file has `settings.staging_bytes` itself."""
        self.path = path
        try:
            # Opening a named pipe without a writer would block.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise storage_error(path, error) from None
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise StorageError(f"{path} is not a regular file")
        self._reader = DirectFile(self._descriptor, settings.direct_io, staging or BufferPool(settings.staging_bytes))
        self._version = _version(status)
        self._size = status.st_size
        self._lock = threading.Lock()
        self._reads = 0
        self._closed = False

    @property
    def uri(self) -> str:
        """See `Blob.uri`."""
        return self.path.absolute().as_uri()

    @property
    def size(self) -> int:
        """See `Blob.size`."""
        return self._size

    @property
    def version(self) -> str:
        """See `Blob.version`: inode, size and modification time."""
        return self._version

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """See `Blob.read`. Raises StorageChanged if the file was modified since it was opened."""
        with self.reading():
            try:
                self._reader.read(offset, into)
            except EndOfFile:
                self._check()
                raise StorageError(f"{self.path} ends at byte {self._size}") from None
            except OSError as error:
                raise storage_error(self.path, error) from None

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Yield the descriptor, which stays open within the block. Raises the errors of `read`, also on exit."""
        with self._kept_open():
            yield self._descriptor
            self._check()

    def cached(self, offset: int, length: int) -> bool:
        """Return True if most of this range is known to be in the page cache. Does not access the file system."""
        with self._kept_open():
            return self._reader.cached(offset, length)

    @contextmanager
    def _kept_open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StorageError(f"{self.path} is closed")
            self._reads += 1
        try:
            yield
        finally:
            self._release()

    def close(self) -> None:
        """Close immediately, or when the last read in progress ends, which may hang."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = not self._reads
        if last:
            self._reader.close()
            os.close(self._descriptor)

    def _release(self) -> None:
        with self._lock:
            self._reads -= 1
            last = self._closed and not self._reads
        if last:
            self._reader.close()
            os.close(self._descriptor)

    def _check(self) -> None:
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise storage_error(self.path, error) from None
        if _version(status) != self._version:
            raise StorageChanged(f"{self.path} was modified while it was read")


class LocalStore:
    """A local folder; see `BlobStore`."""

    def __init__(self, folder: Location, settings: StorageSettings) -> None:
        if "\0" in folder.path:
            raise SettingsError(f"{folder.path!r} is not a valid file name")
        self._uri = folder.folder.uri
        self._folder = Path(folder.path)
        self._settings = settings
        self._staging = BufferPool(settings.staging_bytes)

    @property
    def uri(self) -> str:
        """See `BlobStore.uri`."""
        return self._uri

    def open(self, name: str, *, front: int = 0) -> LocalFile:
        """See `BlobStore.open`."""
        return LocalFile(self._path(name), self._settings, self._staging)

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        """See `BlobStore.list`: omits files that are being written; does not follow links to folders."""
        if prefix.startswith("/"):  # no name begins with a slash
            return
        below, _, begins = prefix.rpartition("/")
        folder = self._path(below) if below else self._folder
        if below and not folder.is_dir():
            return
        yield from _listed(folder, f"{below}/" if below else "", begins)

    @contextmanager
    def write(self, name: str, *, replace: bool = True) -> Iterator[LocalWriter]:
        """See `BlobStore.write`: uses a name with a leading dot until the file is complete and synced."""
        path = self._path(name)
        # Not the process id: two machines may use the same one on a shared folder.
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise storage_error(path, error) from None
            try:
                yield LocalWriter(path, descriptor)
                commit_file(descriptor, temporary, path, replace=replace)
            finally:
                os.close(descriptor)
        finally:  # also if Ctrl-C arrived while the file was created
            with suppress(OSError):
                temporary.unlink()

    def remove(self, name: str) -> None:
        """See `BlobStore.remove`; folders that become empty are kept."""
        path = self._path(name)
        try:
            path.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise storage_error(path, error) from None

    def close(self) -> None:
        """See `BlobStore.close`: nothing to close."""

    def _path(self, name: str) -> Path:
        if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
            raise SettingsError(f"{name!r} is not a valid file name within {self._folder}")
        return self._folder / name


class LocalWriter:
    """Writer of a local file; see `BlobWriter`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def write(self, views: Sequence[memoryview]) -> None:
        """See `BlobWriter.write`. Raises StorageFull if the disk is full."""
        left = [view for view in views if view.nbytes][::-1]
        try:
            while left:
                count = os.writev(self._descriptor, left[: -MAX_IOVECS - 1 : -1])
                while left and count >= left[-1].nbytes:
                    count -= left.pop().nbytes
                if count:
                    left[-1] = left[-1][count:]
        except OSError as error:
            raise storage_error(self._path, error) from None


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _listed(folder: Path, within: str, begins: str) -> Iterator[BlobEntry]:
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if entry.name.startswith(begins)]
    except OSError as error:
        raise storage_error(folder, error) from None
    # Same order as object stores, by the complete name: "a-b" comes before "a/b".
    folders = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
    for entry in sorted(entries, key=lambda entry: entry.name + "/" * (entry.name in folders)):
        name = within + entry.name
        if entry.name in folders:
            yield from _listed(folder / entry.name, f"{name}/", "")
        elif not TEMPORARY.fullmatch(entry.name):
            try:
                status = entry.stat()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):  # removed meanwhile, or a dangling link
                    continue
                raise storage_error(folder / entry.name, error) from None
            if stat.S_ISREG(status.st_mode):
                yield BlobEntry(name, status.st_size)
