"""Division of an image into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.image.chunks import MAX_CHUNK_BYTES, MAX_CHUNKS, MIB, Chunks, chunk_size_for


@pytest.mark.parametrize(
    ("image_bytes", "size"),
    [
        (0, MIB),
        (1, MIB),
        (128 * MIB, MIB),
        (128 * MIB + 1, 2 * MIB),
        (16 << 30, 128 * MIB),
        (32 << 30, 256 * MIB),
        (1 << 40, 256 * MIB),
    ],
)
def test_the_chunk_size_is_a_power_of_two(image_bytes: int, size: int) -> None:
    """Chunk sizes grow by powers of two up to 256 MiB, so that there are at most 128 chunks."""
    assert size == chunk_size_for(image_bytes)


@given(st.integers(0, 1 << 36))
def test_chunks_cover_the_image_in_order(image_bytes: int) -> None:
    """Chunks are consecutive from 0 to the image's end; each but the last has the full size."""
    chunks = Chunks.of(image_bytes)
    cut = list(chunks)
    assert [0, *(end for _, end in cut)] == [*(begin for begin, _ in cut), image_bytes]
    assert all(end - begin == chunks.chunk_size for begin, end in cut[:-1])
    assert len(cut) == len(chunks)
    assert len(cut) <= MAX_CHUNKS or chunks.chunk_size == MAX_CHUNK_BYTES


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [(0, 1, [0]), (0, 10, [0]), (9, 11, [0, 1]), (10, 20, [1]), (0, 25, [0, 1, 2]), (5, 5, [0])],
)
def test_a_range_is_covered_by_all_chunks_that_it_overlaps(begin: int, end: int, expected: list[int]) -> None:
    """A byte range is covered by every chunk that it overlaps."""
    assert expected == list(Chunks(25, 10).covering(begin, end))


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_outside_the_image_is_an_error(index: int) -> None:
    """An index outside the image raises IndexError."""
    with pytest.raises(IndexError, match=f"chunk {index} of 3"):
        Chunks(25, 10)[index]
