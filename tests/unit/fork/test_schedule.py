"""Which chunk is read next, and from whom."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rfork.fork.schedule import Read, Schedule

COUNT = 6


def ready(count: int = COUNT, **routes: tuple[int, int]) -> Schedule:
    """A schedule in which each named source gives all chunks of its range."""
    schedule = Schedule(count)
    schedule.adopt({source: [part] for source, part in routes.items()})
    for source, part in routes.items():
        schedule.offer(source, [part])
    return schedule


def test_an_image_of_no_chunks_is_complete() -> None:
    """There is nothing to read and nothing to plan."""
    schedule = Schedule(0)
    assert (True, False, None) == (schedule.complete, schedule.unassigned, schedule.take())


def test_a_new_schedule_wants_a_plan() -> None:
    """Nothing is assigned at first, so nothing can be taken."""
    schedule = Schedule(COUNT)
    assert (False, True, None, 0) == (
        schedule.complete,
        schedule.unassigned,
        schedule.take(),
        schedule.in_flight,
    )


def test_what_is_verified_before_is_not_read() -> None:
    """A fork that goes on from a board reads only what is missing."""
    schedule = Schedule(COUNT, [(0, 2), (3, 6)])
    schedule.adopt({"a": [(0, 6)]})
    schedule.offer("a", [(0, 6)])
    assert (Read("a", 2), None) == (schedule.take(), schedule.take())


def test_an_assigned_chunk_waits_until_it_is_offered() -> None:
    """A relay's chunks are read as it offers them, the lowest first."""
    schedule = Schedule(COUNT)
    schedule.adopt({"a": [(0, 6)]})
    before = schedule.take()
    schedule.offer("a", [(4, 6)])
    schedule.offer("a", [(1, 2)])
    taken = [schedule.take() for _ in range(4)]
    assert (None, [Read("a", 1), Read("a", 4), Read("a", 5), None]) == (before, taken)


def test_an_offer_before_the_plan_counts() -> None:
    """A source may say what it has before the plan that names it is adopted."""
    schedule = Schedule(COUNT)
    schedule.offer("a", [(0, 1)])
    schedule.adopt({"a": [(0, 6)]})
    assert Read("a", 0) == schedule.take()


def test_an_offer_beyond_the_image_is_cut() -> None:
    """A source that offers more chunks than there are costs no memory for them."""
    schedule = Schedule(COUNT)
    schedule.adopt({"a": [(0, 6)]})
    schedule.offer("a", [(5, 1 << 62)])
    assert (Read("a", 5), None) == (schedule.take(), schedule.take())


def test_several_sources_are_drawn_on_at_once() -> None:
    """The next read goes to the source with the fewest reads under way."""
    schedule = ready(a=(0, 3), b=(3, 6))
    taken = [schedule.take() for _ in range(6)]
    assert [
        Read("a", 0),
        Read("b", 3),
        Read("a", 1),
        Read("b", 4),
        Read("a", 2),
        Read("b", 5),
    ] == taken


def test_verified_chunks_complete_the_image() -> None:
    """An image is complete with its last verified chunk, and not before."""
    schedule = ready(2, a=(0, 2))
    states = []
    for read in (Read("a", 0), Read("a", 1)):
        assert read == schedule.take()
        schedule.verified(read)
        states.append(schedule.complete)
    assert [False, True] == states


def test_a_dropped_chunk_is_read_again() -> None:
    """A read that failed leaves its chunk with whoever it is assigned to, and is counted."""
    schedule = ready(1, a=(0, 1))
    schedule.take()
    schedule.dropped(Read("a", 0))
    assert (Read("a", 0), {0: 1}) == (schedule.take(), schedule.repeated)


def test_a_failed_source_gives_its_chunks_back() -> None:
    """After a failure the chunks of that source, and only those, want a new plan."""
    schedule = ready(a=(0, 3), b=(3, 6))
    schedule.fail("a")
    taken = [schedule.take() for _ in range(4)]
    assert (True, [Read("b", 3), Read("b", 4), Read("b", 5), None]) == (schedule.unassigned, taken)


def test_a_failed_source_must_offer_anew() -> None:
    """What a source offered before it failed is forgotten."""
    schedule = ready(a=(0, 6))
    schedule.fail("a")
    schedule.adopt({"a": [(0, 6)]})
    assert None is schedule.take()


def test_a_chunk_in_flight_stays_with_its_reader() -> None:
    """A new plan that moves a chunk to another source waits for the read that is under way."""
    schedule = ready(1, a=(0, 1))
    read = schedule.take()
    schedule.adopt({"b": [(0, 1)]})
    schedule.offer("b", [(0, 1)])
    meanwhile = schedule.take()
    schedule.dropped(Read("a", 0))
    assert (Read("a", 0), None, Read("b", 0)) == (read, meanwhile, schedule.take())


def test_a_chunk_in_flight_from_a_failed_source_is_not_planned_yet() -> None:
    """Only once its reader has dropped it does a chunk in flight want a new plan."""
    schedule = ready(1, a=(0, 1))
    schedule.take()
    schedule.fail("a")
    before = schedule.unassigned
    schedule.dropped(Read("a", 0))
    assert (False, True) == (before, schedule.unassigned)


def test_wanted_from() -> None:
    """A source is wanted while chunks are assigned to it or being read from it."""
    schedule = ready(2, a=(0, 1), b=(1, 2))
    schedule.take()
    schedule.adopt({"b": [(1, 2)]})
    schedule.verified(Read("b", 1))
    assert (True, False, False) == tuple(schedule.wanted_from(source) for source in ("a", "b", "c"))


def test_starved() -> None:
    """A source starves us when it has assigned chunks, and none that can be or is being read."""
    schedule = Schedule(2)
    schedule.adopt({"a": [(0, 2)]})
    states = [schedule.starved("a")]
    schedule.offer("a", [(0, 1)])
    states.append(schedule.starved("a"))
    schedule.take()
    states.append(schedule.starved("a"))
    schedule.verified(Read("a", 0))
    states.append(schedule.starved("a"))
    schedule.offer("a", [(1, 2)])
    schedule.take()
    schedule.verified(Read("a", 1))
    states.append(schedule.starved("a"))
    assert [True, False, False, True, False] == states


SOURCES = st.sampled_from("abc")
PARTS = st.lists(st.tuples(st.integers(0, COUNT), st.integers(0, COUNT)), max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("adopt"), st.dictionaries(SOURCES, PARTS, max_size=3)),
        st.tuples(st.just("offer"), st.tuples(SOURCES, PARTS)),
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("verified"), st.integers(0, COUNT)),
        st.tuples(st.just("dropped"), st.integers(0, COUNT)),
        st.tuples(st.just("fail"), SOURCES),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_the_order_no_chunk_has_two_readers(steps: list[tuple[str, object]]) -> None:
    """In any order of events a chunk has one reader, none once verified, and the counts are right."""
    schedule = Schedule(COUNT)
    in_flight: dict[int, Read] = {}
    verified: set[int] = set()
    taken: Counter[int] = Counter()
    for step, detail in steps:
        match step, detail:
            case "adopt", dict() as routes:
                schedule.adopt(routes)
            case "offer", (str() as source, list() as parts):
                schedule.offer(source, parts)
            case "fail", str() as source:
                schedule.fail(source)
            case "take", None:
                read = schedule.take()
                if read is not None:
                    assert read.chunk not in in_flight.keys() | verified
                    in_flight[read.chunk] = read
                    taken[read.chunk] += 1
            case (("verified" | "dropped"), int() as number):
                if in_flight:
                    read = in_flight.pop(sorted(in_flight)[number % len(in_flight)])
                    if step == "verified":
                        schedule.verified(read)
                        verified.add(read.chunk)
                    else:
                        schedule.dropped(read)
        assert (len(in_flight), verified == set(range(COUNT))) == (schedule.in_flight, schedule.complete)
    assert {chunk: times - 1 for chunk, times in taken.items() if times > 1} == schedule.repeated


@given(STEPS)
def test_whatever_came_before_the_rest_can_be_read(steps: list[tuple[str, object]]) -> None:
    """After any events, one good source that has all chunks completes the image."""
    schedule = Schedule(COUNT)
    for step, detail in steps:
        match step, detail:
            case "adopt", dict() as routes:
                schedule.adopt(routes)
            case "offer", (str() as source, list() as parts):
                schedule.offer(source, parts)
            case "take", None:
                if (read := schedule.take()) is not None:
                    schedule.dropped(read)
            case "fail", str() as source:
                schedule.fail(source)
    schedule.adopt({"good": [(0, COUNT)]})
    schedule.offer("good", [(0, COUNT)])
    assert not schedule.unassigned
    while (read := schedule.take()) is not None:
        schedule.verified(read)
    assert schedule.complete


def test_what_a_source_offered_before_it_was_given_up_is_void() -> None:
    """Named by a later plan, it is read from only once its new channel has offered again."""
    schedule = ready(a=(0, COUNT))
    schedule.fail("a")
    schedule.adopt({"a": ((0, COUNT),)})
    before = schedule.take()
    schedule.offer("a", ((0, 1),))
    assert [None, Read("a", 0)] == [before, schedule.take()]


def test_a_dropped_chunk_is_wanted_again() -> None:
    """A verified chunk that turned out wrong has no source until the next plan."""
    schedule = Schedule(2, [(0, 2)])
    before = schedule.unassigned, schedule.complete
    schedule.drop([1])
    assert ((False, True), (True, False)) == (before, (schedule.unassigned, schedule.complete))


def test_what_is_read_from_whom() -> None:
    """What is in flight and what is planned, by source, without what is verified."""
    schedule = Schedule(5, [(0, 1)])
    schedule.adopt({"a": [(0, 3)], "b": [(3, 5)]})
    schedule.offer("a", [(0, 3)])
    schedule.take()
    assert {"a": ((1, 3),), "b": ((3, 5),)} == schedule.shares


def test_a_filled_schedule_is_complete() -> None:
    """After a loader wrote every chunk nothing is left to read."""
    schedule = Schedule(3)
    schedule.adopt({"a": [(0, 3)]})
    schedule.fill()
    assert (True, {}, None) == (schedule.complete, schedule.shares, schedule.take())


def test_what_comes_next_from_a_source() -> None:
    """Those in flight, and the lowest that wait: not what is verified, not offered, or given by another."""
    schedule = Schedule(COUNT)
    schedule.adopt({"a": [(0, 5)], "b": [(5, 6)]})
    schedule.offer("a", [(0, 4), (5, 6)])
    schedule.offer("b", [(0, COUNT)])
    reads = [read for read in (schedule.take(), schedule.take(), schedule.take()) if read is not None]
    schedule.verified(next(read for read in reads if read.chunk == 0))
    assert (([1], [2, 3]), ([1], [2]), ([5], []), ([], [])) == (
        schedule.upcoming("a", 9),
        schedule.upcoming("a", 1),
        schedule.upcoming("b", 9),
        schedule.upcoming("c", 9),
    )
