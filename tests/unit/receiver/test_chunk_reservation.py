"""Chunk scheduling with chunks reserved for a local spool."""

from __future__ import annotations

import pytest

from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler
from tests.unit.receiver.spools import ALL, CHUNKS


def scheduled(*reserved: int) -> ChunkScheduler:
    """Return a scheduler in which one source serves every chunk except the reserved ones."""
    scheduler = ChunkScheduler(CHUNKS)
    scheduler.assign({"a": [ALL]})
    scheduler.reserve("here", reserved)
    scheduler.mark_available("a", [ALL])
    return scheduler


def test_a_plan_does_not_change_reservations() -> None:
    """Reserved chunks are returned only by `next_reserved`, in order and once each."""
    scheduler = scheduled(1, 4)
    scheduler.assign({"b": [ALL]})
    scheduler.mark_available("b", [ALL])
    others = [scheduler.next_read() for _ in range(CHUNKS - 1)]
    next_reads = [scheduler.next_reserved() for _ in range(3)]
    assert [ChunkRead("here", 1), ChunkRead("here", 4), None] == next_reads
    assert [0, 2, 3, 5, None] == [read.chunk if read else None for read in others]


def test_chunks_in_flight_or_verified_cannot_be_reserved() -> None:
    """Two readers never write to the same chunk."""
    scheduler = scheduled()
    first, second = scheduler.next_read(), scheduler.next_read()
    assert first is not None
    assert second is not None
    scheduler.verified(first)
    scheduler.reserve("here", [first.chunk, second.chunk])
    assert scheduler.next_reserved() is None
    assert not scheduler.unassigned


@pytest.mark.parametrize("chunks", [None, [1]])
def test_an_unreserved_chunk_needs_a_plan(chunks: list[int] | None) -> None:
    """It is not read before that plan."""
    scheduler = scheduled(1)
    read = scheduler.next_reserved()
    assert read is not None
    scheduler.dropped(read)
    scheduler.unreserve(chunks)
    assert scheduler.unassigned
    assert scheduler.next_reserved() is None
    assert 0 == scheduler.in_flight
    scheduler.assign({"a": [ALL]})
    scheduler.mark_available("a", [ALL])
    next_reads = [scheduler.next_read() for _ in range(CHUNKS)]
    assert None not in next_reads


def test_reserved_chunks_complete_an_image() -> None:
    """They count like any other chunk, and never as rereads."""
    scheduler = scheduled(*range(CHUNKS))
    while (read := scheduler.next_reserved()) is not None:
        scheduler.verified(read)
    assert scheduler.complete
    assert {} == scheduler.rereads
