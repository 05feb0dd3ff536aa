"""The schedule of a fork some of whose chunks are here already."""

from __future__ import annotations

import pytest

from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler
from tests.unit.receiver.spools import ALL, CHUNKS


def scheduled(*reserved: int) -> ChunkScheduler:
    """A schedule in which one source gives everything but what is claimed."""
    schedule = ChunkScheduler(CHUNKS)
    schedule.assign({"a": [ALL]})
    schedule.reserve("here", reserved)
    schedule.mark_available("a", [ALL])
    return schedule


def test_a_plan_does_not_change_a_claim() -> None:
    """Claimed chunks are taken by `next_reserved` alone, in order, each once."""
    schedule = scheduled(1, 4)
    schedule.assign({"b": [ALL]})
    schedule.mark_available("b", [ALL])
    others = [schedule.next_read() for _ in range(CHUNKS - 1)]
    next_reads = [schedule.next_reserved() for _ in range(3)]
    assert ([ChunkRead("here", 1), ChunkRead("here", 4), None], [0, 2, 3, 5, None]) == (
        next_reads,
        [read.chunk if read else None for read in others],
    )


def test_what_is_under_way_or_done_is_not_claimed() -> None:
    """Two readers never write to one chunk."""
    schedule = scheduled()
    first, second = schedule.next_read(), schedule.next_read()
    assert first is not None
    assert second is not None
    schedule.verified(first)
    schedule.reserve("here", [first.chunk, second.chunk])
    assert (None, False) == (schedule.next_reserved(), schedule.unassigned)


@pytest.mark.parametrize("chunks", [None, [1]])
def test_a_chunk_that_is_disclaimed_wants_a_plan(chunks: list[int] | None) -> None:
    """Until then nobody reads it."""
    schedule = scheduled(1)
    read = schedule.next_reserved()
    assert read is not None
    schedule.dropped(read)
    schedule.unreserve(chunks)
    before = (schedule.unassigned, schedule.next_reserved(), schedule.in_flight)
    schedule.assign({"a": [ALL]})
    schedule.mark_available("a", [ALL])
    next_reads = [schedule.next_read() for _ in range(CHUNKS)]
    assert ((True, None, 0), False) == (before, None in next_reads)


def test_claimed_chunks_complete_an_image() -> None:
    """They count like any other, and never as read again."""
    schedule = scheduled(*range(CHUNKS))
    while (read := schedule.next_reserved()) is not None:
        schedule.verified(read)
    assert (True, {}) == (schedule.complete, schedule.rereads)
