from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.fleet import Demand, Group, Place, Source
from planner.policy import plan
from rfork.image.ranges import Range, count, from_indices, normalise, subtract
from tests.unit.planner.builders import (
    CHUNKS,
    LAYOUT,
    NOW,
    OTHER_LAYOUT,
    OTHER_WEIGHTS,
    WEIGHTS,
    group,
    loading,
    seed,
)

NAMES = tuple("abcdefgh")
chunk_sets = st.sets(st.integers(0, CHUNKS - 1)).map(from_indices)


@st.composite
def sources(draw: st.DrawFn, name: str) -> Source:
    """Any source that the planner may know."""
    return seed(
        name,
        layout_id=draw(st.sampled_from([LAYOUT, LAYOUT, LAYOUT, OTHER_LAYOUT])),
        weights_id=draw(st.sampled_from([WEIGHTS, WEIGHTS, OTHER_WEIGHTS, None])),
        generation=draw(st.integers(0, 2)),
        state=draw(st.sampled_from(["serving", "loading", "draining"])),
        verified=draw(st.one_of(st.just(((0, CHUNKS),)), chunk_sets)),
        transports=draw(st.sampled_from([("http",), ("http", "memory"), ("memory",)])),
        place=Place(draw(st.sampled_from(["h1", "h2"])), draw(st.sampled_from([None, "r1"]))),
        max_readers=draw(st.integers(0, 3)),
        expires_at=draw(st.sampled_from([NOW, NOW + 1])),
        quarantined_until=draw(st.sampled_from([0.0, NOW + 1])),
    )


@st.composite
def fleets(draw: st.DrawFn) -> Group:
    """Any fleet, with any routes, even ones that run in circles."""
    members = [draw(sources(name)) for name in draw(st.sets(st.sampled_from(NAMES)))]
    parents = st.sets(st.sampled_from(NAMES), max_size=2).map(lambda names: tuple(sorted(names)))
    return group(*members, reads=draw(st.dictionaries(st.sampled_from(NAMES), parents)))


@given(fleets(), st.sampled_from(NAMES), chunk_sets, st.sets(st.sampled_from(NAMES)))
def test_a_plan_covers_what_is_missing_once_and_names_fit_sources_only(
    fleet: Group, name: str, verified: tuple[Range, ...], blamed: set[str]
) -> None:
    """Whatever the fleet: routes are disjoint, their union is what is missing, and no source is unfit."""
    target = loading(name, *verified)
    fork_id = f"fork-{name}"
    decision = plan(fleet, Demand(fork_id, target, dict.fromkeys(blamed, "x")), NOW)
    assigned = [each for route in decision.assignments for each in route.chunks]
    missing = subtract([(0, CHUNKS)], verified)
    if decision.assignments:
        assert missing == normalise(assigned)
        assert count(missing) == count(assigned)
    else:
        assert decision.reason
    for route in decision.assignments:
        source = fleet.sources[route.source_id]
        assert source.expires_at > NOW
        assert source.state != "draining"
        assert source.quarantined_until <= NOW
        assert source.layout_id == LAYOUT
        assert source.weights_id in (decision.weights_id, None)
        assert not verified or decision.weights_id == WEIGHTS
        assert route.source_id not in {name, *blamed}
        assert len(fleet.readers.get(route.source_id, frozenset()) - {fork_id}) < source.max_readers
        assert set(route.transports) == set(source.transports) & set(target.transports) != set()


@given(st.data())
def test_fleets_that_plans_alone_built_have_no_circles_and_nobody_over_capacity(data: st.DataObject) -> None:
    """Targets come, progress, lose their sources and ask again in any order: the routes stay a forest."""
    fleet = {name: seed(name, max_readers=data.draw(st.integers(1, 2))) for name in ("s1", "s2")}
    reads: dict[str, tuple[str, ...]] = {}
    for _ in range(data.draw(st.integers(1, 14))):
        name = data.draw(st.sampled_from(NAMES))
        held = data.draw(st.integers(0, CHUNKS - 1))
        fleet[name] = loading(name, *normalise([(0, held)]), max_readers=2)
        blamed = data.draw(st.sets(st.sampled_from(reads.get(name) or ("s1",))))
        fleet_now = group(*fleet.values(), reads=reads)
        decision = plan(fleet_now, Demand(f"fork-{name}", fleet[name], dict.fromkeys(blamed, "x")), NOW)
        reads[name] = tuple(route.source_id for route in decision.assignments)
        load = [source for parents in reads.values() for source in parents]
        assert all(load.count(source) <= fleet[source].max_readers for source in load)
        assert not any(target in upstream(target, reads) for target in reads)


def upstream(target: str, reads: dict[str, tuple[str, ...]]) -> set[str]:
    """All that the target reads from, directly or through others."""
    found: set[str] = set()
    line = list(reads.get(target, ()))
    while line:
        source = line.pop()
        if source not in found:
            found.add(source)
            line.extend(reads.get(source, ()))
    return found
