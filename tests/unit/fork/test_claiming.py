"""The schedule of a fork some of whose chunks are here already."""

from __future__ import annotations

import pytest

from rfork.fork.schedule import Read, Schedule
from tests.unit.fork.resuming import ALL, CHUNKS


def scheduled(*claimed: int) -> Schedule:
    """A schedule in which one source gives everything but what is claimed."""
    schedule = Schedule(CHUNKS)
    schedule.adopt({"a": [ALL]})
    schedule.claim("here", claimed)
    schedule.offer("a", [ALL])
    return schedule


def test_a_plan_does_not_change_a_claim() -> None:
    """Claimed chunks are taken by `take_claimed` alone, in order, each once."""
    schedule = scheduled(1, 4)
    schedule.adopt({"b": [ALL]})
    schedule.offer("b", [ALL])
    others = [schedule.take() for _ in range(CHUNKS - 1)]
    taken = [schedule.take_claimed() for _ in range(3)]
    assert ([Read("here", 1), Read("here", 4), None], [0, 2, 3, 5, None]) == (
        taken,
        [read.chunk if read else None for read in others],
    )


def test_what_is_under_way_or_done_is_not_claimed() -> None:
    """Two readers never write to one chunk."""
    schedule = scheduled()
    first, second = schedule.take(), schedule.take()
    assert first is not None
    assert second is not None
    schedule.verified(first)
    schedule.claim("here", [first.chunk, second.chunk])
    assert (None, False) == (schedule.take_claimed(), schedule.unassigned)


@pytest.mark.parametrize("chunks", [None, [1]])
def test_a_chunk_that_is_disclaimed_wants_a_plan(chunks: list[int] | None) -> None:
    """Until then nobody reads it."""
    schedule = scheduled(1)
    read = schedule.take_claimed()
    assert read is not None
    schedule.dropped(read)
    schedule.disclaim(chunks)
    before = (schedule.unassigned, schedule.take_claimed(), schedule.in_flight)
    schedule.adopt({"a": [ALL]})
    schedule.offer("a", [ALL])
    taken = [schedule.take() for _ in range(CHUNKS)]
    assert ((True, None, 0), False) == (before, None in taken)


def test_claimed_chunks_complete_an_image() -> None:
    """They count like any other, and never as read again."""
    schedule = scheduled(*range(CHUNKS))
    while (read := schedule.take_claimed()) is not None:
        schedule.verified(read)
    assert (True, {}) == (schedule.complete, schedule.repeated)
