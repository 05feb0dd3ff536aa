"""One blob composed of others: a snapshot whose header and chunks are shared objects.

Runs wherever a snapshot is read.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from rfork.errors import StorageCorrupt, StorageError, StorageNotFound
from rfork.storage.blob import Blob, BlobStore, ViewCursor

MAX_OPEN = 128
"""Maximum number of open objects: each may use a file descriptor, of which a process has about a thousand."""


@dataclass(slots=True)
class _OpenObject:
    """An open object and its number of current readers."""

    blob: Blob
    users: int


class ChunkedBlob:
    """Concatenation of objects in one store; see `rfork.storage.blob.Blob`. Thread-safe.

    Objects are opened on first read; at most `MAX_OPEN` idle ones stay open, the least recently used are
    closed. Owns `store` and closes it.
    """

    version = None

    def __init__(self, uri: str, store: BlobStore, parts: Sequence[tuple[str, int]]) -> None:
        """`parts` are names and sizes in bytes, in order."""
        self.uri = uri
        self._store = store
        self._parts = tuple(parts)
        self._begins = list(accumulate((length for _, length in parts), initial=0))
        self.size = self._begins.pop()
        self._lock = threading.Lock()
        self._open_objects: OrderedDict[int, _OpenObject] = OrderedDict()
        self._closed = False

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """See `Blob.read`; raises StorageCorrupt if an object is missing or has another size."""
        views = [view for view in into if view.nbytes]
        end = offset + sum(view.nbytes for view in views)
        if not 0 <= offset <= end <= self.size:
            raise StorageCorrupt(f"{self.uri} ends at byte {self.size}, before byte {end}")
        cursor = ViewCursor(views)
        for index, begin, length in self.within(offset, end):
            with self.part(index) as blob:
                blob.read(begin, cursor.next_views(length))

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over the parts that contain `[begin, end)`: index, offset in the part, and length."""
        index = bisect_right(self._begins, begin) - 1
        while begin < end:
            inside = begin - self._begins[index]
            length = min(end - begin, self._parts[index][1] - inside)
            if length:
                yield index, inside, length
            begin += length
            index += 1

    @contextmanager
    def part(self, index: int) -> Iterator[Blob]:
        """Yield the object with this index, open at least for the duration of the block."""
        open_object = self._acquire(index)
        try:
            yield open_object.blob
        finally:
            self._release(open_object)

    def prepare(self, indices: Sequence[int], threads: int) -> None:
        """Open these objects (at most `MAX_OPEN`) in parallel. Raises the same errors as `read`."""
        with ThreadPoolExecutor(threads, thread_name_prefix="rfork-open") as pool:
            for _ in pool.map(self._touch, indices):
                pass

    def close(self) -> None:
        """See `Blob.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            open_objects = list(self._open_objects.values())
        for one in open_objects:
            one.blob.close()
        self._store.close()

    def _touch(self, index: int) -> None:
        self._release(self._acquire(index))

    def _acquire(self, index: int) -> _OpenObject:
        with self._lock:
            open_object = self._find_open(index)
        if open_object is not None:
            return open_object
        opened = self._opened(index)
        try:
            with self._lock:
                open_object = self._find_open(index)
                if open_object is None:
                    self._open_objects[index] = mine = _OpenObject(opened, 1)
                    return mine
        except StorageError:  # closed meanwhile
            opened.close()
            raise
        opened.close()  # another thread was faster
        return open_object

    def _find_open(self, index: int) -> _OpenObject | None:
        """Return the object with one more user, if it is open."""
        if self._closed:
            raise StorageError(f"{self.uri} is closed")
        open_object = self._open_objects.get(index)
        if open_object is not None:
            open_object.users += 1
            self._open_objects.move_to_end(index)
        return open_object

    def _opened(self, index: int) -> Blob:
        name, length = self._parts[index]
        try:
            blob = self._store.open(name)
        except StorageNotFound:
            raise StorageCorrupt(f"{self.uri}: missing object {self._store.uri}{name}") from None
        if blob.size != length:
            blob.close()
            raise StorageCorrupt(f"{blob.uri} has {blob.size} bytes instead of {length}")
        return blob

    def _release(self, open_object: _OpenObject) -> None:
        with self._lock:
            open_object.users -= 1
            idle = [index for index, one in self._open_objects.items() if not one.users]
            spare = [self._open_objects.pop(index) for index in idle[: max(0, len(self._open_objects) - MAX_OPEN)]]
        for one in spare:
            one.blob.close()
