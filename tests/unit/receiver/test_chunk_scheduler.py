"""Selection of the next chunk and its source, and the number of concurrent reads from a source."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.image import ranges
from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler, ReadConcurrency
from rfork.testing.peers import InMemoryPeer
from rfork.transport.base import Endpoint
from tests.unit.receiver.fleet import (
    CHUNKS,
    NEVER_S,
    Fleet,
    Target,
    content_hash,
    image,
    plan,
    route,
)
from tests.unit.receiver.spools import ALL

COUNT = 6


def partly_verified(count: int, *parts: ranges.Range) -> ChunkScheduler:
    """Return a scheduler with these chunks verified."""
    scheduler = ChunkScheduler(count)
    for chunk in ranges.indices(parts):
        scheduler.verified(ChunkRead("earlier", chunk))
    return scheduler


def build_scheduler(count: int = COUNT, **routes: tuple[int, int]) -> ChunkScheduler:
    """Return a scheduler in which each named source serves all chunks of its range."""
    scheduler = ChunkScheduler(count)
    scheduler.assign({source: [part] for source, part in routes.items()})
    for source, part in routes.items():
        scheduler.mark_available(source, [part])
    return scheduler


def test_an_image_of_no_chunks_is_complete() -> None:
    """There is nothing to read and nothing to plan."""
    scheduler = ChunkScheduler(0)
    assert (True, False, None) == (scheduler.complete, scheduler.unassigned, scheduler.next_read())


def test_a_new_scheduler_needs_a_plan() -> None:
    """No chunk is assigned yet, so none can be read."""
    scheduler = ChunkScheduler(COUNT)
    assert (False, True, None, 0) == (
        scheduler.complete,
        scheduler.unassigned,
        scheduler.next_read(),
        scheduler.in_flight,
    )


def test_verified_chunks_are_not_read() -> None:
    """A fork that resumes from a chunk state reads only the missing chunks."""
    scheduler = partly_verified(COUNT, (0, 2), (3, 6))
    scheduler.assign({"a": [(0, 6)]})
    scheduler.mark_available("a", [(0, 6)])
    assert (ChunkRead("a", 2), None) == (scheduler.next_read(), scheduler.next_read())


def test_an_assigned_chunk_waits_until_it_is_offered() -> None:
    """A relay's chunks are read as it offers them, in order of their index."""
    scheduler = ChunkScheduler(COUNT)
    scheduler.assign({"a": [(0, 6)]})
    before = scheduler.next_read()
    scheduler.mark_available("a", [(4, 6)])
    scheduler.mark_available("a", [(1, 2)])
    next_reads = [scheduler.next_read() for _ in range(4)]
    assert (None, [ChunkRead("a", 1), ChunkRead("a", 4), ChunkRead("a", 5), None]) == (before, next_reads)


def test_an_offer_before_the_plan_counts() -> None:
    """A source may offer chunks before the plan that names it is applied."""
    scheduler = ChunkScheduler(COUNT)
    scheduler.mark_available("a", [(0, 1)])
    scheduler.assign({"a": [(0, 6)]})
    assert ChunkRead("a", 0) == scheduler.next_read()


def test_an_offer_beyond_the_image_is_truncated() -> None:
    """A source that offers more chunks than exist costs no memory for them."""
    scheduler = ChunkScheduler(COUNT)
    scheduler.assign({"a": [(0, 6)]})
    scheduler.mark_available("a", [(5, 1 << 62)])
    assert (ChunkRead("a", 5), None) == (scheduler.next_read(), scheduler.next_read())


def test_reads_are_balanced_across_sources() -> None:
    """The next read goes to the source with the fewest reads in flight."""
    scheduler = build_scheduler(a=(0, 3), b=(3, 6))
    next_reads = [scheduler.next_read() for _ in range(6)]
    assert [
        ChunkRead("a", 0),
        ChunkRead("b", 3),
        ChunkRead("a", 1),
        ChunkRead("b", 4),
        ChunkRead("a", 2),
        ChunkRead("b", 5),
    ] == next_reads


def test_verified_chunks_complete_the_image() -> None:
    """The image is complete with its last verified chunk, not before."""
    scheduler = build_scheduler(2, a=(0, 2))
    states = []
    for read in (ChunkRead("a", 0), ChunkRead("a", 1)):
        assert read == scheduler.next_read()
        scheduler.verified(read)
        states.append(scheduler.complete)
    assert [False, True] == states


def test_a_dropped_chunk_is_read_again() -> None:
    """A chunk whose read failed stays assigned to its source, and the reread is counted."""
    scheduler = build_scheduler(1, a=(0, 1))
    scheduler.next_read()
    scheduler.dropped(ChunkRead("a", 0))
    assert (ChunkRead("a", 0), {0: 1}) == (scheduler.next_read(), scheduler.rereads)


def test_chunks_of_a_failed_source_need_a_new_plan() -> None:
    """Chunks of other sources are not affected."""
    scheduler = build_scheduler(a=(0, 3), b=(3, 6))
    scheduler.fail("a")
    next_reads = [scheduler.next_read() for _ in range(4)]
    assert (True, [ChunkRead("b", 3), ChunkRead("b", 4), ChunkRead("b", 5), None]) == (
        scheduler.unassigned,
        next_reads,
    )


def test_a_failed_source_must_offer_its_chunks_again() -> None:
    """Its earlier offers are forgotten."""
    scheduler = build_scheduler(a=(0, 6))
    scheduler.fail("a")
    scheduler.assign({"a": [(0, 6)]})
    assert None is scheduler.next_read()


def test_a_chunk_in_flight_stays_with_its_reader() -> None:
    """A new plan that moves a chunk to another source waits for the read in flight."""
    scheduler = build_scheduler(1, a=(0, 1))
    read = scheduler.next_read()
    scheduler.assign({"b": [(0, 1)]})
    scheduler.mark_available("b", [(0, 1)])
    concurrent_read = scheduler.next_read()
    scheduler.dropped(ChunkRead("a", 0))
    assert (ChunkRead("a", 0), None, ChunkRead("b", 0)) == (read, concurrent_read, scheduler.next_read())


def test_a_chunk_in_flight_from_a_failed_source_is_not_planned_yet() -> None:
    """It needs a new plan only once its reader has dropped it."""
    scheduler = build_scheduler(1, a=(0, 1))
    scheduler.next_read()
    scheduler.fail("a")
    before = scheduler.unassigned
    scheduler.dropped(ChunkRead("a", 0))
    assert (False, True) == (before, scheduler.unassigned)


def test_a_source_is_needed_while_it_has_assigned_or_in_flight_chunks() -> None:
    """The last reads of a source are finished before it counts as unused."""
    scheduler = build_scheduler(2, a=(0, 1), b=(1, 2))
    scheduler.next_read()
    scheduler.assign({"b": [(1, 2)]})
    scheduler.verified(ChunkRead("b", 1))
    assert (True, False, False) == tuple(scheduler.has_assigned(source) for source in ("a", "b", "c"))


def test_a_source_without_readable_chunks_is_starved() -> None:
    """It has assigned chunks, but none that is being read or can be read."""
    scheduler = ChunkScheduler(2)
    scheduler.assign({"a": [(0, 2)]})
    states = [scheduler.is_starved("a")]
    scheduler.mark_available("a", [(0, 1)])
    states.append(scheduler.is_starved("a"))
    scheduler.next_read()
    states.append(scheduler.is_starved("a"))
    scheduler.verified(ChunkRead("a", 0))
    states.append(scheduler.is_starved("a"))
    scheduler.mark_available("a", [(1, 2)])
    scheduler.next_read()
    scheduler.verified(ChunkRead("a", 1))
    states.append(scheduler.is_starved("a"))
    assert [True, False, False, True, False] == states


SOURCES = st.sampled_from("abc")
PARTS = st.lists(st.tuples(st.integers(0, COUNT), st.integers(0, COUNT)), max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("assign"), st.dictionaries(SOURCES, PARTS, max_size=3)),
        st.tuples(st.just("offer"), st.tuples(SOURCES, PARTS)),
        st.tuples(st.just("read"), st.none()),
        st.tuples(st.just("verified"), st.integers(0, COUNT)),
        st.tuples(st.just("dropped"), st.integers(0, COUNT)),
        st.tuples(st.just("fail"), SOURCES),
    ),
    max_size=60,
)


@given(STEPS)
def test_a_chunk_never_has_two_readers(steps: list[tuple[str, object]]) -> None:
    """In any order of events a chunk has at most one reader, none once verified, and the counts are right."""
    scheduler = ChunkScheduler(COUNT)
    in_flight: dict[int, ChunkRead] = {}
    verified: set[int] = set()
    read_counts: Counter[int] = Counter()
    for step, detail in steps:
        match step, detail:
            case "assign", dict() as routes:
                scheduler.assign(routes)
            case "offer", (str() as source, list() as parts):
                scheduler.mark_available(source, parts)
            case "fail", str() as source:
                scheduler.fail(source)
            case "read", None:
                read = scheduler.next_read()
                if read is not None:
                    assert read.chunk not in in_flight.keys() | verified
                    in_flight[read.chunk] = read
                    read_counts[read.chunk] += 1
            case (("verified" | "dropped"), int() as number):
                if in_flight:
                    read = in_flight.pop(sorted(in_flight)[number % len(in_flight)])
                    if step == "verified":
                        scheduler.verified(read)
                        verified.add(read.chunk)
                    else:
                        scheduler.dropped(read)
        covered = verified.union(*(ranges.indices(part) for part in scheduler.shares.values()))
        assert len(in_flight) == scheduler.in_flight
        assert (verified == set(range(COUNT))) == scheduler.complete
        assert (covered != set(range(COUNT))) == scheduler.unassigned
    assert {chunk: times - 1 for chunk, times in read_counts.items() if times > 1} == scheduler.rereads


@given(STEPS)
def test_one_good_source_always_completes_the_image(steps: list[tuple[str, object]]) -> None:
    """After any sequence of events, one source with all chunks is enough."""
    scheduler = ChunkScheduler(COUNT)
    for step, detail in steps:
        match step, detail:
            case "assign", dict() as routes:
                scheduler.assign(routes)
            case "offer", (str() as source, list() as parts):
                scheduler.mark_available(source, parts)
            case "read", None:
                if (read := scheduler.next_read()) is not None:
                    scheduler.dropped(read)
            case "fail", str() as source:
                scheduler.fail(source)
    scheduler.assign({"good": [(0, COUNT)]})
    scheduler.mark_available("good", [(0, COUNT)])
    assert not scheduler.unassigned
    while (read := scheduler.next_read()) is not None:
        scheduler.verified(read)
    assert scheduler.complete


def test_offers_made_before_a_failure_are_void() -> None:
    """A failed source that a later plan names is read only after it has offered chunks on its new channel."""
    scheduler = build_scheduler(a=(0, COUNT))
    scheduler.fail("a")
    scheduler.assign({"a": ((0, COUNT),)})
    before = scheduler.next_read()
    scheduler.mark_available("a", ((0, 1),))
    assert [None, ChunkRead("a", 0)] == [before, scheduler.next_read()]


def test_an_invalidated_chunk_needs_a_plan() -> None:
    """A verified chunk that turns out wrong has no source until the next plan."""
    scheduler = partly_verified(2, (0, 2))
    before = scheduler.unassigned, scheduler.complete
    scheduler.invalidate([1])
    assert ((False, True), (True, False)) == (before, (scheduler.unassigned, scheduler.complete))


def test_shares_list_unverified_chunks_by_source() -> None:
    """They include chunks in flight and chunks planned."""
    scheduler = partly_verified(5, (0, 1))
    scheduler.assign({"a": [(0, 3)], "b": [(3, 5)]})
    scheduler.mark_available("a", [(0, 3)])
    scheduler.next_read()
    assert {"a": ((1, 3),), "b": ((3, 5),)} == scheduler.shares


def test_a_scheduler_with_all_chunks_verified_is_complete() -> None:
    """After a loader has written every chunk, nothing is left to read."""
    scheduler = ChunkScheduler(3)
    scheduler.assign({"a": [(0, 3)]})
    scheduler.mark_all_verified()
    assert (True, {}, None) == (scheduler.complete, scheduler.shares, scheduler.next_read())


def test_upcoming_chunks_of_a_source() -> None:
    """They are the chunks in flight and the next ones that are offered and assigned to this source, up to the
    limit.
    """
    scheduler = ChunkScheduler(COUNT)
    scheduler.assign({"a": [(0, 5)], "b": [(5, 6)]})
    scheduler.mark_available("a", [(0, 4), (5, 6)])
    scheduler.mark_available("b", [(0, COUNT)])
    reads = [read for read in (scheduler.next_read(), scheduler.next_read(), scheduler.next_read()) if read is not None]
    scheduler.verified(next(read for read in reads if read.chunk == 0))
    assert (([1], [2, 3]), ([1], [2]), ([5], []), ([], [])) == (
        scheduler.upcoming("a", 9),
        scheduler.upcoming("a", 1),
        scheduler.upcoming("b", 9),
        scheduler.upcoming("c", 9),
    )


def test_a_chunk_that_this_instance_checks_has_no_other_reader() -> None:
    """It is read from its source only if the check fails."""
    scheduler = build_scheduler(1, a=(0, 1))
    assert scheduler.begin_local("kept", 0)
    assert None is scheduler.next_read()
    scheduler.dropped(ChunkRead("kept", 0))
    assert ChunkRead("a", 0) == scheduler.next_read()


def test_a_check_of_a_chunk_is_no_reread() -> None:
    """Its bytes are in the image already."""
    scheduler = build_scheduler(1, a=(0, 1))
    scheduler.begin_local("kept", 0)
    scheduler.dropped(ChunkRead("kept", 0))
    scheduler.next_read()
    assert {} == scheduler.rereads


def test_a_chunk_that_is_read_or_verified_is_not_checked() -> None:
    """Two threads never use the same chunk."""
    scheduler = build_scheduler(2, a=(0, 1))
    scheduler.next_read()
    scheduler.begin_local("kept", 1)
    scheduler.verified(ChunkRead("kept", 1))
    assert not scheduler.begin_local("kept", 0)
    assert not scheduler.begin_local("kept", 1)


def test_a_checked_chunk_needs_no_plan() -> None:
    """Until the check has failed."""
    scheduler = ChunkScheduler(1)
    scheduler.begin_local("kept", 0)
    assert not scheduler.unassigned
    scheduler.dropped(ChunkRead("kept", 0))
    assert scheduler.unassigned


def test_reads_in_flight_do_not_include_reserved_chunks() -> None:
    """Those are not read by the workers, and their number must not limit the reads."""
    scheduler = build_scheduler(4, a=(0, 4))
    scheduler.reserve("spool", [0])
    scheduler.next_reserved()
    scheduler.begin_local("kept", 1)
    scheduler.next_read()
    assert 3 == scheduler.in_flight
    assert 2 == scheduler.reads_in_flight()


def test_the_verified_chunks() -> None:
    """They include those of the start, and no longer those that were invalidated."""
    scheduler = partly_verified(4, (0, 2))
    scheduler.verified(ChunkRead("a", 3))
    scheduler.invalidate([1])
    assert {0, 3} == scheduler.verified_chunks


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


Window = Callable[[str], int]


def shared_scheduler(late: str | None = None) -> ChunkScheduler:
    """Return a scheduler that assigns two of four chunks to each of two sources.

    Only `a` offers its chunks, and it offers all four.
    """
    scheduler = ChunkScheduler(4)
    scheduler.assign({"a": [(0, 2)], "b": [(2, 4)]})
    scheduler.mark_available("a", [(0, 4)])
    scheduler.late = frozenset() if late is None else frozenset({late})
    return scheduler


def test_chunks_of_a_late_source_are_read_from_an_idle_one() -> None:
    """The idle source first serves its own chunks."""
    scheduler = shared_scheduler(late="b")
    assert [0, 1, 2, 3] == [read.chunk for read in (scheduler.next_read() for _ in range(4)) if read is not None]


def test_a_source_that_is_not_late_keeps_its_chunks() -> None:
    """A relay that has not received its chunks yet is waited for, as planned."""
    scheduler = shared_scheduler()
    assert [ChunkRead("a", 0), ChunkRead("a", 1), None] == [scheduler.next_read() for _ in range(3)]


def test_reads_from_a_source_stay_within_its_window() -> None:
    """The window includes chunks that were assigned to another source."""
    scheduler = shared_scheduler(late="b")
    next_reads = [scheduler.next_read(lambda _: 2) for _ in range(3)]
    assert [ChunkRead("a", 0), ChunkRead("a", 1), None] == next_reads


def test_a_late_source_does_not_serve_chunks_of_another_late_source() -> None:
    """Neither has delivered a byte."""
    scheduler = ChunkScheduler(2)
    scheduler.assign({"a": [(0, 1)], "b": [(1, 2)]})
    scheduler.mark_available("a", [(0, 2)])
    scheduler.late = frozenset({"a", "b"})
    assert [ChunkRead("a", 0), None] == [scheduler.next_read() for _ in range(2)]


class SilentPeer(InMemoryPeer):
    """A peer that never responds and whose connection can be closed."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._closed = threading.Event()

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        self._closed.wait(NEVER_S)
        return super().open(layout_id, transports, deadline)

    def close(self) -> None:
        self._closed.set()
        super().close()


def test_chunks_of_a_silent_source_are_read_from_another(fleet: Fleet) -> None:
    """The fork completes without any message from the silent source."""
    source_image = image(1)
    good, silent = fleet.source("good", source_image), fleet.source("silent", source_image)
    dial = fleet.peers.dial
    fleet.peers.dial = (  # type: ignore[method-assign]
        lambda address, token: (
            SilentPeer(fleet.peers, address, token) if address == silent.report().address else dial(address, token)
        )
    )
    target = Target(fleet, lambda *_: plan(route(good, (0, 3)), route(silent, (3, CHUNKS))))
    stats = target.run()
    assert content_hash(source_image) == content_hash(target.image)
    assert ["good"] == [share.source_id for share in stats.sources]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(25 * MIB, 1), (255 * MIB, 1), (300 * MIB, 2), (1200 * MIB, 4), (10_000 * MIB, 4)],
)
def test_faster_links_allow_more_concurrent_reads(rate: int, expected: int) -> None:
    """One connection fills a link of one or two gigabits; the configured window is the maximum."""
    concurrency = ReadConcurrency(4)
    concurrency.record_chunk(rate, 1.0, 0)
    assert expected == concurrency.window("http")


def test_the_first_read_measures_the_rate() -> None:
    """Before the first chunk has arrived the rate is unknown, so there is only one read."""
    assert 1 == ReadConcurrency(4).window("http")


def test_sources_on_this_host_use_the_full_window() -> None:
    """They share no link, and concurrent copies use more memory bandwidth."""
    concurrency = ReadConcurrency(4)
    concurrency.record_chunk(100 * MIB, 1.0, 0)
    assert 4 == concurrency.window("shared_memory")
    assert 1 == concurrency.window("http")


def test_concurrent_reads_share_the_rate() -> None:
    """Four chunks of 100 MiB that arrive within the same second make 400 MiB per second."""
    concurrency = ReadConcurrency(4)
    concurrency.record_chunk(100 * MIB, 1.0, 3)
    assert 2 == concurrency.window("http")


def one_per_source(_source_id: str) -> int:
    return 1


def test_reads_of_one_source_stay_within_its_window() -> None:
    """A second source is read from while the first is busy; the third read waits."""
    scheduler = ChunkScheduler(4)
    scheduler.assign({"a": ((0, 2),), "b": ((2, 4),)})
    for name in "ab":
        scheduler.mark_available(name, ((0, 4),))
    first = scheduler.next_read(one_per_source)
    assert ChunkRead("a", 0) == first
    assert ChunkRead("b", 2) == scheduler.next_read(one_per_source)
    assert scheduler.next_read(one_per_source) is None
    assert first is not None
    scheduler.verified(first)
    assert ChunkRead("a", 1) == scheduler.next_read(one_per_source)


# -- own storage besides peers --------------------------------------------------------------------------


def test_chunks_are_lent_from_the_end_of_the_longest_list() -> None:
    """Their source reads the first ones itself, and the chunk that is being read stays with it."""
    scheduler = build_scheduler(12, a=(0, 8), b=(8, 12))
    scheduler.mark_available("own", [(0, 12)])
    scheduler.next_read()
    scheduler.lend("own", 2)
    assert (6, 8) == scheduler.shares["own"][0]


def test_chunks_without_a_source_are_lent_first() -> None:
    """Nothing else could read them."""
    scheduler = build_scheduler(8, a=(0, 4))
    scheduler.lend("own", 2)
    assert ((6, 8),) == scheduler.shares["own"]


def test_no_more_than_a_quarter_of_the_chunks_is_lent() -> None:
    """So that the last ones are read by the source that is free first."""
    scheduler = build_scheduler(8, a=(0, 8))
    scheduler.lend("own", 100)
    assert ((6, 8),) == scheduler.shares["own"]


def test_a_lent_chunk_that_was_not_read_counts() -> None:
    """Chunks are lent only as others are read."""
    scheduler = build_scheduler(8, a=(0, 8))
    scheduler.lend("own", 2)
    scheduler.lend("own", 2)
    assert ((6, 8),) == scheduler.shares["own"]


def test_reserved_chunks_are_not_lent() -> None:
    """The spool fills them."""
    scheduler = build_scheduler(2, a=(0, 2))
    scheduler.reserve("spool", [0, 1])
    scheduler.lend("own", 2)
    assert "own" not in scheduler.shares


def test_an_idle_source_takes_back_what_was_not_begun() -> None:
    """If the lender has nothing else to read."""
    scheduler = build_scheduler(1, a=(0, 1))
    scheduler.mark_available("own", [(0, 1)])
    scheduler.lend("own", 1)
    scheduler.late = frozenset({"own"})
    assert ChunkRead("a", 0) == scheduler.next_read(lambda source: 0 if source == "own" else 1)


def test_a_transferred_read_is_repeated_by_the_other_source() -> None:
    """Once it has failed: a chunk has one reader at a time."""
    scheduler = build_scheduler(1, a=(0, 1))
    scheduler.mark_available("own", [(0, 1)])
    read = scheduler.next_read()
    assert read is not None
    scheduler.transfer("a", "own")
    scheduler.fail("a")
    assert scheduler.next_read() is None
    scheduler.dropped(read)
    assert ChunkRead("own", 0) == scheduler.next_read()


def test_a_transferred_chunk_needs_no_plan() -> None:
    """It has a source, also while the read from the previous one has not ended."""
    scheduler = build_scheduler(1, a=(0, 1))
    scheduler.next_read()
    scheduler.transfer("a", "own")
    scheduler.fail("a")
    assert not scheduler.unassigned
