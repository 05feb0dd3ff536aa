"""Chunks: the fixed-size ranges of an image that are transferred, verified, planned and retried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rfork.image.ranges import Range

MIB = 1 << 20
MIN_CHUNK_BYTES = MIB
MAX_CHUNK_BYTES = 256 * MIB
MAX_CHUNKS = 128
"""Maximum number of chunks up to 32 GiB. A chain of N relays takes (k + N - 1) chunk times, so more chunks
mean less pipeline fill, and fewer mean less overhead per chunk. Larger images have more chunks, of the
maximum size.
"""


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
