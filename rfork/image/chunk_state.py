"""The chunk board: which chunks of an image hold verified bytes, and their digests.

A seed's board is full from the start; a relay's fills while it forks. Transports ask it before they
give a range, the peer service streams its changes to the readers, and the puller posts to it.

While nobody knows the manifest yet, because an instance of the group still reads it from storage, the
chunks on the board belong to a *draft*: their digests are those that the reader from storage found,
handed on from relay to relay, and chunks of two drafts are never mixed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from rfork.image import ranges
from rfork.image.chunks import Chunks

Listener = Callable[[], None]


class ChunkState:
    """Thread-safe set of verified chunks of one image; one stays so until `invalidate` or `clear`."""

    def __init__(self, chunks: Chunks, verified: Iterable[int] = ()) -> None:
        self.chunks = chunks
        self._lock = threading.Lock()
        self._verified = set(verified)
        self._draft: str | None = None
        self._digests: dict[int, bytes] = {}
        self._listeners: list[Listener] = []

    @classmethod
    def full(cls, chunks: Chunks) -> ChunkState:
        """The board of a source that holds every chunk."""
        return cls(chunks, range(len(chunks)))

    def mark_verified(self, index: int, digest: bytes | None = None) -> None:
        """Say that chunk `index` is verified; `digest` (16 bytes) is that of its bytes, where it is known."""
        with self._lock:
            self._verified.add(index)
            if digest is not None:
                self._digests[index] = digest
        self._notify()

    def invalidate(self, indices: Iterable[int]) -> None:
        """Say that these chunks are not valid any more."""
        with self._lock:
            for index in indices:
                self._verified.discard(index)
                self._digests.pop(index, None)
        self._notify()

    def clear(self) -> None:
        """Say that no chunk is valid any more (the weights changed)."""
        with self._lock:
            self._verified.clear()
            self._digests.clear()
            self._draft = None
        self._notify()

    def set_provisional_id(self, provisional_id: str | None) -> None:
        """The chunks belong to this draft from now on; None: to no draft."""
        with self._lock:
            self._draft = provisional_id

    @property
    def provisional_id(self) -> str | None:
        """The draft that the chunks belong to, where they did not come with a manifest."""
        return self._draft

    @property
    def digests(self) -> dict[int, bytes]:
        """The digests of the verified chunks, as far as they are known."""
        with self._lock:
            return dict(self._digests)

    @property
    def provisional_state(self) -> tuple[str | None, dict[int, bytes]]:
        """`provisional_id` and `digests`, as they are at one time."""
        with self._lock:
            return self._draft, dict(self._digests)

    @property
    def verified(self) -> tuple[ranges.Range, ...]:
        """The verified chunks as ranges of chunk indices."""
        with self._lock:
            return ranges.from_indices(self._verified)

    def __len__(self) -> int:
        """How many chunks are verified."""
        return len(self._verified)

    def __contains__(self, index: int) -> bool:
        return index in self._verified

    @property
    def complete(self) -> bool:
        """Whether every chunk is verified."""
        return len(self._verified) == len(self.chunks)

    def contains_range(self, set_provisional_id: int, end: int) -> bool:
        """Whether every chunk that shares a byte with image range `[begin, end)` is verified."""
        return all(index in self._verified for index in self.chunks.covering(set_provisional_id, end))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after every change, on the thread that made it; returns the way to stop."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unsubscribe

    def _notify(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
