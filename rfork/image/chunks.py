"""Chunks: the fixed-size ranges of an image that are transferred, verified, planned and retried.

`ChunkState` is the set of verified chunks and their digests. A seed's state is complete from the start; a relay's
fills while it forks. Transports check it before they serve a range, the peer service streams its changes to
readers, and the transfer updates it.

While no instance knows the manifest yet, because one of the group still reads it from storage, the chunks
belong to a *provisional* manifest: their digests are those computed by the reader of the storage and
forwarded from relay to relay. Chunks of two provisional manifests are never mixed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rfork.image import ranges
from rfork.image.ranges import Range

MIB = 1 << 20
MIN_CHUNK_BYTES = MIB
MAX_CHUNK_BYTES = 256 * MIB
MAX_CHUNKS = 128
"""Maximum number of chunks up to 32 GiB. A chain of N relays takes (k + N - 1) chunk times, so more chunks
mean less pipeline fill, and fewer mean less overhead per chunk. Larger images have more chunks, of the
maximum size.
"""

Listener = Callable[[], None]


def chunk_size_for(image_bytes: int) -> int:
    """Return the chunk size in bytes for an image of `image_bytes`: a power of two between 1 and 256 MiB."""
    size = MIN_CHUNK_BYTES
    while size < MAX_CHUNK_BYTES and size * MAX_CHUNKS < image_bytes:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class Chunks:
    """Division of an image of `image_bytes` into chunks. Every chunk but the last has `chunk_size` bytes."""

    image_bytes: int
    chunk_size: int

    @classmethod
    def of(cls, image_bytes: int) -> Chunks:
        """Return the canonical division of an image of this size."""
        return cls(image_bytes, chunk_size_for(image_bytes))

    def __len__(self) -> int:
        return -(-self.image_bytes // self.chunk_size)

    def __getitem__(self, index: int) -> Range:
        """Return the byte range `[begin, end)` of chunk `index` in the image."""
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        begin = index * self.chunk_size
        return begin, min(begin + self.chunk_size, self.image_bytes)

    def __iter__(self) -> Iterator[Range]:
        return (self[index] for index in range(len(self)))

    def covering(self, begin: int, end: int) -> range:
        """Return the indices of all chunks that overlap `[begin, end)`."""
        return range(begin // self.chunk_size, -(-end // self.chunk_size))


class ChunkState:
    """Thread-safe set of the verified chunks of one image. A chunk stays verified until `invalidate` or `clear`."""

    def __init__(self, chunks: Chunks, verified: Iterable[int] = ()) -> None:
        self.chunks = chunks
        self._lock = threading.Lock()
        self._verified = set(verified)
        self._provisional_id: str | None = None
        self._digests: dict[int, bytes] = {}
        self._listeners: list[Listener] = []

    @classmethod
    def full(cls, chunks: Chunks) -> ChunkState:
        """Return the state of a complete source."""
        return cls(chunks, range(len(chunks)))

    def mark_verified(self, index: int, digest: bytes | None = None) -> None:
        """Mark chunk `index` as verified; `digest` (16 bytes) is its digest, if known."""
        with self._lock:
            self._verified.add(index)
            if digest is not None:
                self._digests[index] = digest
        self._notify()

    def invalidate(self, indices: Iterable[int]) -> None:
        """Mark these chunks as not verified."""
        with self._lock:
            for index in indices:
                self._verified.discard(index)
                self._digests.pop(index, None)
        self._notify()

    def clear(self) -> None:
        """Mark all chunks as not verified, because the weights have changed."""
        with self._lock:
            self._verified.clear()
            self._digests.clear()
            self._provisional_id = None
        self._notify()

    def set_provisional_id(self, provisional_id: str | None) -> None:
        """Assign the chunks to this provisional manifest; None: to none."""
        with self._lock:
            self._provisional_id = provisional_id

    @property
    def provisional_id(self) -> str | None:
        """The provisional manifest of the chunks, or None if they have a final one."""
        return self._provisional_id

    @property
    def digests(self) -> dict[int, bytes]:
        """The known digests of the verified chunks."""
        with self._lock:
            return dict(self._digests)

    @property
    def provisional_state(self) -> tuple[str | None, dict[int, bytes]]:
        """A consistent pair of `provisional_id` and `digests`."""
        with self._lock:
            return self._provisional_id, dict(self._digests)

    @property
    def verified(self) -> tuple[ranges.Range, ...]:
        """The verified chunks as ranges of chunk indices."""
        with self._lock:
            return ranges.from_indices(self._verified)

    def __len__(self) -> int:
        """Return the number of verified chunks."""
        return len(self._verified)

    def __contains__(self, index: int) -> bool:
        return index in self._verified

    @property
    def complete(self) -> bool:
        """True if every chunk is verified."""
        return len(self._verified) == len(self.chunks)

    def contains_range(self, begin: int, end: int) -> bool:
        """Return True if every chunk that overlaps image range `[begin, end)` is verified."""
        return all(index in self._verified for index in self.chunks.covering(begin, end))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after every change, on the thread that made it. Returns a function that unsubscribes."""
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
