"""Selection of the next chunk and its source."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rfork.image import ranges
from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler

COUNT = 6


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
    scheduler = ChunkScheduler(COUNT, [(0, 2), (3, 6)])
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
    scheduler = ChunkScheduler(2, [(0, 2)])
    before = scheduler.unassigned, scheduler.complete
    scheduler.invalidate([1])
    assert ((False, True), (True, False)) == (before, (scheduler.unassigned, scheduler.complete))


def test_shares_list_unverified_chunks_by_source() -> None:
    """They include chunks in flight and chunks planned."""
    scheduler = ChunkScheduler(5, [(0, 1)])
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
    assert 2 == scheduler.reads_in_flight


def test_the_verified_chunks() -> None:
    """They include those of the start, and no longer those that were invalidated."""
    scheduler = ChunkScheduler(4, [(0, 2)])
    scheduler.verified(ChunkRead("a", 3))
    scheduler.invalidate([1])
    assert {0, 3} == scheduler.verified_chunks
