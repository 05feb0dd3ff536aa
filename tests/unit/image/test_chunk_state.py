"""ChunkState: verified chunks, waiting for them, and notifications."""

from __future__ import annotations

import pytest

from rfork.image.chunks import Chunks, ChunkState

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
