"""One blob put together from others: a snapshot whose header and chunks are shared objects.

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

from rfork.errors import StorageCorrupt, StorageError, StorageMissing
from rfork.storage.blob import Blob, Store
from rfork.storage.cursor import Cursor

MOST_OPEN = 128
"""Objects held open at once: each may be a descriptor, of which a process has about a thousand."""


@dataclass(slots=True)
class _Held:
    """An object that is open, and how many read it now."""

    blob: Blob
    users: int


class SharedBlob:
    """The objects of one store, one behind the other; see `rfork.storage.blob.Blob`. Thread-safe.

    An object is opened when it is first read, and closed once `MOST_OPEN` others were read since. `store` is
    this blob's own: closed with it.
    """

    version = None

    def __init__(self, uri: str, store: Store, parts: Sequence[tuple[str, int]]) -> None:
        """`parts` are names and bytes, in order."""
        self.uri = uri
        self._store = store
        self._parts = tuple(parts)
        self._begins = list(accumulate((length for _, length in parts), initial=0))
        self.size = self._begins.pop()
        self._lock = threading.Lock()
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._closed = False

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """See `Blob.read`; StorageCorrupt where an object is missing or has another size."""
        views = [view for view in into if view.nbytes]
        end = offset + sum(view.nbytes for view in views)
        if not 0 <= offset <= end <= self.size:
            raise StorageCorrupt(f"{self.uri} ends at byte {self.size}, before byte {end}")
        cursor = Cursor(views)
        for index, begin, length in self.within(offset, end):
            with self.part(index) as blob:
                blob.read(begin, cursor.take(length))

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The parts that hold `[begin, end)`: index, first byte in the part, and bytes."""
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
        """The object at that place, for the length of the block at least."""
        held = self._take(index)
        try:
            yield held.blob
        finally:
            self._put_back(held)

    def prepare(self, indices: Sequence[int], threads: int) -> None:
        """Open these objects, at most `MOST_OPEN`, side by side. Raises as `read` does."""
        with ThreadPoolExecutor(threads, thread_name_prefix="rfork-open") as pool:
            for _ in pool.map(self._touch, indices):
                pass

    def close(self) -> None:
        """See `Blob.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            held = list(self._held.values())
        for one in held:
            one.blob.close()
        self._store.close()

    def _touch(self, index: int) -> None:
        self._put_back(self._take(index))

    def _take(self, index: int) -> _Held:
        with self._lock:
            held = self._known(index)
        if held is not None:
            return held
        opened = self._opened(index)
        try:
            with self._lock:
                held = self._known(index)
                if held is None:
                    self._held[index] = mine = _Held(opened, 1)
                    return mine
        except StorageError:  # closed meanwhile
            opened.close()
            raise
        opened.close()  # another thread was faster
        return held

    def _known(self, index: int) -> _Held | None:
        """One more user of the object, where it is open."""
        if self._closed:
            raise StorageError(f"{self.uri} is closed")
        held = self._held.get(index)
        if held is not None:
            held.users += 1
            self._held.move_to_end(index)
        return held

    def _opened(self, index: int) -> Blob:
        name, length = self._parts[index]
        try:
            blob = self._store.open(name)
        except StorageMissing:
            raise StorageCorrupt(f"{self.uri} lacks its object {self._store.uri}{name}") from None
        if blob.size != length:
            blob.close()
            raise StorageCorrupt(f"{blob.uri} has {blob.size} bytes instead of {length}")
        return blob

    def _put_back(self, held: _Held) -> None:
        with self._lock:
            held.users -= 1
            idle = [index for index, one in self._held.items() if not one.users]
            spare = [self._held.pop(index) for index in idle[: max(0, len(self._held) - MOST_OPEN)]]
        for one in spare:
            one.blob.close()
