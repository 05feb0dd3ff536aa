"""Division of an image into chunks, and ChunkState: verified chunks and notifications."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.image.chunks import MAX_CHUNK_BYTES, MAX_CHUNKS, MIB, Chunks, ChunkState, chunk_size_for


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


CHUNKS = Chunks(45, 10)


def test_a_new_state_has_no_chunks() -> None:
    """Nothing is verified at first."""
    state = ChunkState(CHUNKS)
    assert () == state.verified
    assert 0 == len(state)
    assert not state.complete
    assert 0 not in state


def test_a_full_state_has_every_chunk() -> None:
    """A seed has every chunk from the start."""
    state = ChunkState.full(CHUNKS)
    assert ((0, 5),) == state.verified
    assert 5 == len(state)
    assert state.complete
    assert 4 in state


def test_an_empty_image_is_complete() -> None:
    """An image without chunks has nothing left to verify."""
    assert ChunkState(Chunks(0, 10)).complete


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [(0, 20, True), (0, 21, False), (20, 30, False), (30, 40, True), (39, 41, False)],
)
def test_a_range_is_contained_if_all_its_chunks_are_verified(begin: int, end: int, expected: bool) -> None:
    """A byte range is contained if every chunk that it overlaps is verified."""
    assert expected == ChunkState(CHUNKS, [0, 1, 3]).contains_range(begin, end)


def test_listeners_are_notified_until_they_unsubscribe() -> None:
    """They are called after every change, on the thread that made it."""
    state, notifications = ChunkState(CHUNKS), []
    unsubscribe = state.subscribe(lambda: notifications.append(state.verified))
    state.mark_verified(1)
    state.mark_verified(2)
    state.clear()
    unsubscribe()
    unsubscribe()
    state.mark_verified(0)
    assert [((1, 2),), ((1, 3),), ()] == notifications


def test_an_invalidated_chunk_is_not_contained() -> None:
    """An invalidated chunk loses its digest; invalidating a missing chunk is not an error."""
    state = ChunkState(CHUNKS)
    state.mark_verified(1, b"one")
    state.mark_verified(2, b"two")
    state.invalidate([1, 4])
    assert ((2, 3),) == state.verified
    assert {2: b"two"} == state.digests


def test_the_provisional_id_is_cleared_with_the_chunks() -> None:
    """The provisional id is returned with the digests of its chunks; clearing the state removes it."""
    state = ChunkState(CHUNKS)
    state.set_provisional_id("files")
    state.mark_verified(3, b"three")
    before = state.provisional_state
    state.clear()
    assert ("files", {3: b"three"}) == before
    assert (None, {}) == state.provisional_state
