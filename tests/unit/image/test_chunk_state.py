"""The chunk board: what is verified, who waits for it, who is told."""

from __future__ import annotations

import pytest

from rfork.image.chunk_state import ChunkState
from rfork.image.chunks import Chunks

CHUNKS = Chunks(45, 10)


def test_a_fresh_board_holds_nothing() -> None:
    """Nothing is verified at first."""
    board = ChunkState(CHUNKS)
    assert ((), 0, False, False) == (board.verified, len(board), board.complete, 0 in board)


def test_a_full_board_holds_everything() -> None:
    """A seed's board holds every chunk from the start."""
    board = ChunkState.full(CHUNKS)
    assert (((0, 5),), 5, True, True) == (board.verified, len(board), board.complete, 4 in board)


def test_an_empty_image_is_complete() -> None:
    """An image without chunks has nothing left to verify."""
    assert ChunkState(Chunks(0, 10)).complete


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [(0, 20, True), (0, 21, False), (20, 30, False), (30, 40, True), (39, 41, False)],
)
def test_holds(begin: int, end: int, expected: bool) -> None:
    """A byte range is held when every chunk it touches is verified."""
    assert expected == ChunkState(CHUNKS, [0, 1, 3]).contains_range(begin, end)


def test_marks_are_told_until_unsubscribed() -> None:
    """Listeners hear of every change, on the thread that made it, until they leave."""
    board, notifications = ChunkState(CHUNKS), []
    unsubscribe = board.subscribe(lambda: notifications.append(board.verified))
    board.mark_verified(1)
    board.mark_verified(2)
    board.clear()
    unsubscribe()
    unsubscribe()
    board.mark_verified(0)
    assert [((1, 2),), ((1, 3),), ()] == notifications


def test_a_dropped_chunk_is_not_held() -> None:
    """What turned out wrong is gone, with its digest; dropping what is not there is no error."""
    board = ChunkState(CHUNKS)
    board.mark_verified(1, b"one")
    board.mark_verified(2, b"two")
    board.invalidate([1, 4])
    assert (((2, 3),), {2: b"two"}) == (board.verified, board.digests)


def test_the_draft_goes_with_its_chunks() -> None:
    """A draft is told with the digests of its chunks; clearing the board ends it."""
    board = ChunkState(CHUNKS)
    board.set_provisional_id("files")
    board.mark_verified(3, b"three")
    before = board.provisional_state
    board.clear()
    assert (("files", {3: b"three"}), (None, {})) == (before, board.provisional_state)
