"""Chunks: the fixed-size ranges of an image that are moved, verified, planned and retried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rfork.image.ranges import Range

MIB = 1 << 20
MIN_CHUNK_BYTES = MIB
MAX_CHUNK_BYTES = 256 * MIB
MAX_CHUNKS = 128
"""Small images get at most this many chunks. A chain of N relays takes (k + N - 1) chunk times, so
more chunks mean less pipeline fill; fewer mean less overhead a chunk. Past 32 GiB the largest chunk
size rules and the count grows with the image."""


def chunk_size_for(image_bytes: int) -> int:
    """The chunk size, in bytes, of an image of `image_bytes`: a power of two between 1 and 256 MiB."""
    size = MIN_CHUNK_BYTES
    while size < MAX_CHUNK_BYTES and size * MAX_CHUNKS < image_bytes:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class Chunks:
    """How an image of `image_bytes` is cut; every chunk but the last has `chunk_size` bytes."""

    image_bytes: int
    chunk_size: int

    @classmethod
    def of(cls, image_bytes: int) -> Chunks:
        """The canonical cut of an image of this size."""
        return cls(image_bytes, chunk_size_for(image_bytes))

    def __len__(self) -> int:
        return -(-self.image_bytes // self.chunk_size)

    def __getitem__(self, index: int) -> Range:
        """The byte range `[begin, end)` of chunk `index` in the image."""
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        begin = index * self.chunk_size
        return begin, min(begin + self.chunk_size, self.image_bytes)

    def __iter__(self) -> Iterator[Range]:
        return (self[index] for index in range(len(self)))

    def covering(self, begin: int, end: int) -> range:
        """The indices of all chunks that share a byte with `[begin, end)`."""
        return range(begin // self.chunk_size, -(-end // self.chunk_size))
