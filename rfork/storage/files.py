"""Files that are read by position, straight into memory that exists."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rfork.errors import SettingsError, StorageError

MOST_BUFFERS = 1024
"""Buffers in one call: IOV_MAX of Linux and of macOS."""


class DataFile:
    """A file held open, so that all reads are of the file that was there at first. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}") from None
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self._changed_at = status.st_mtime_ns
        self._lock = threading.Lock()
        self._reads = 0
        self._closed = False

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views with the bytes from `offset` on.

        Raises StorageError when they cannot be read, when the file ends before, when somebody wrote
        to it since it was opened, or after `close`.
        """
        with self._lock:
            if self._closed:
                raise StorageError(f"{self.path} is closed")
            self._reads += 1
        try:
            self._fill(offset, into)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._reads -= 1
            last = self._closed and not self._reads
        if last:
            os.close(self._descriptor)

    def _fill(self, offset: int, into: Sequence[memoryview]) -> None:
        views = [view for view in into if view.nbytes]
        first = 0
        try:
            while first < len(views):
                count = os.preadv(self._descriptor, views[first : first + MOST_BUFFERS], offset)
                if count == 0:
                    raise StorageError(f"{self.path} ends at byte {offset}")
                offset += count
                while first < len(views) and count >= views[first].nbytes:
                    count -= views[first].nbytes
                    first += 1
                if count:
                    views[first] = views[first][count:]
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror or error}") from None
        if (status.st_size, status.st_mtime_ns) != (self.size, self._changed_at):
            raise StorageError(f"{self.path} was written to while it was read")

    def part(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on; raises as `read` does."""
        data = bytearray(length)
        self.read(offset, [memoryview(data)])
        return bytes(data)

    def close(self) -> None:
        """Close it: at once, or with the end of the last read that is under way, which may hang."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = not self._reads
        if last:
            os.close(self._descriptor)


class Cursor:
    """A line of views, taken from its front a number of bytes at a time."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._used = 0

    def take(self, count: int) -> list[memoryview]:
        """Views of the next `count` bytes."""
        taken: list[memoryview] = []
        while count > 0:
            view = self._views[self._index]
            piece = view[self._used : self._used + count]
            taken.append(piece)
            count -= piece.nbytes
            self._used += piece.nbytes
            if self._used == view.nbytes:
                self._index, self._used = self._index + 1, 0
        return taken


def path_of(uri: str) -> Path:
    """The path that a ``file://`` URI names. Raises SettingsError for any other."""
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise SettingsError(
            f"{uri!r} names no file of this machine", hint="e.g. file:///models/llama.safetensors"
        )
    return Path(unquote(parts.path))
