"""The schedule of a fork some of whose chunks are here already."""

from __future__ import annotations

import pytest

from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler
from tests.unit.receiver.spools import ALL, CHUNKS


def scheduled(*reserved: int) -> ChunkScheduler:
    """A schedule in which one source gives everything but what is claimed."""
    scheduler = ChunkScheduler(CHUNKS)
    scheduler.assign({"a": [ALL]})
    scheduler.reserve("here", reserved)
    scheduler.mark_available("a", [ALL])
    return scheduler


def test_a_plan_does_not_change_a_claim() -> None:
    """Claimed chunks are taken by `next_reserved` alone, in order, each once."""
    scheduler = scheduled(1, 4)
    scheduler.assign({"b": [ALL]})
    scheduler.mark_available("b", [ALL])
    others = [scheduler.next_read() for _ in range(CHUNKS - 1)]
    next_reads = [scheduler.next_reserved() for _ in range(3)]
    assert ([ChunkRead("here", 1), ChunkRead("here", 4), None], [0, 2, 3, 5, None]) == (
        next_reads,
        [read.chunk if read else None for read in others],
    )


def test_what_is_under_way_or_done_is_not_claimed() -> None:
    """Two readers never write to one chunk."""
    scheduler = scheduled()
    first, second = scheduler.next_read(), scheduler.next_read()
    assert first is not None
    assert second is not None
    scheduler.verified(first)
    scheduler.reserve("here", [first.chunk, second.chunk])
    assert (None, False) == (scheduler.next_reserved(), scheduler.unassigned)


@pytest.mark.parametrize("chunks", [None, [1]])
def test_a_chunk_that_is_disclaimed_wants_a_plan(chunks: list[int] | None) -> None:
    """Until then nobody reads it."""
    scheduler = scheduled(1)
    read = scheduler.next_reserved()
    assert read is not None
    scheduler.dropped(read)
    scheduler.unreserve(chunks)
    before = (scheduler.unassigned, scheduler.next_reserved(), scheduler.in_flight)
    scheduler.assign({"a": [ALL]})
    scheduler.mark_available("a", [ALL])
    next_reads = [scheduler.next_read() for _ in range(CHUNKS)]
    assert ((True, None, 0), False) == (before, None in next_reads)


def test_claimed_chunks_complete_an_image() -> None:
    """They count like any other, and never as read again."""
    scheduler = scheduled(*range(CHUNKS))
    while (read := scheduler.next_reserved()) is not None:
        scheduler.verified(read)
    assert (True, {}) == (scheduler.complete, scheduler.rereads)
