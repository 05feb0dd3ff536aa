from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.fleet import Demand, Group, Place, Share, Source, Storage
from planner.policy import plan
from rfork.image.ranges import Range, from_indices
from tests.unit.planner.audit import covered, missing, violations
from tests.unit.planner.builders import (
    CHECKPOINT,
    CHUNKS,
    LAYOUT,
    LOADER,
    NOW,
    ORIGIN,
    OTHER_LAYOUT,
    OTHER_ORIGIN,
    OTHER_WEIGHTS,
    SNAPSHOT,
    WEIGHTS,
    group,
    loading,
    seed,
)

MEMBERS = tuple(f"m{index}" for index in range(10))
ALL = ((0, CHUNKS),)
STORAGES = (
    SNAPSHOT,
    CHECKPOINT,
    LOADER,
    Storage("snapshot", "file:///o", OTHER_ORIGIN, OTHER_WEIGHTS),
    Storage("checkpoint", "file:///o", OTHER_ORIGIN),
)
NAMES: list[tuple[str | None, str | None]] = [
    *[(WEIGHTS, None)] * 4, (OTHER_WEIGHTS, None), (WEIGHTS, ORIGIN), (None, ORIGIN), (None, OTHER_ORIGIN),
    (None, None),
]  # fmt: skip


TRANSPORTS: list[tuple[str, ...]] = [
    *[("http",)] * 5, ("http", "memory"), ("memory",), (), *[("shared_memory", "http")] * 2,
    ("shared_memory",), ("nccl", "http"), ("cuda_ipc", "nccl"), ("cuda_ipc", "shared_memory", "http"),
]  # fmt: skip


class Lots(Random):
    """Whole fleets are drawn from one number: field by field would take a hundred times as long."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._number = number

    def __repr__(self) -> str:
        return f"Lots({self._number})"


seeds = st.integers(0, 2**32).map(Lots)


def some(lots: Random) -> tuple[Range, ...]:
    """Any chunks, seldom none or all."""
    return from_indices(index for index in range(CHUNKS) if lots.random() < lots.choice((0.1, 0.5, 0.9)))


def place(lots: Random, name: str) -> Place:
    """A host that others may be on too, and labels that may be missing."""
    host = lots.choice((f"host-{name}", f"host-{name}", "h1", "h2"))
    nvlink = lots.choice((None, None, None, "n1", "n2"))
    return Place(host, lots.choice((None, "r1", "r2")), lots.choice((None, "z1", "z2")), nvlink)


def anybody(lots: Random, name: str) -> Source:
    """Any instance that the planner may know."""
    weights_id, draft = lots.choice(NAMES)
    return seed(
        name,
        layout_id=lots.choice([LAYOUT] * 6 + [OTHER_LAYOUT]),
        weights_id=weights_id,
        draft=draft,
        generation=lots.randrange(3),
        state=lots.choice(["serving"] * 4 + ["loading", "draining"]),
        verified=lots.choice((ALL, ALL, (), some(lots))),
        transports=lots.choice(TRANSPORTS),
        place=place(lots, name),
        max_readers=lots.randrange(5),
        expires_at=lots.choice([NOW + 1] * 6 + [NOW]),
        quarantined_until=lots.choice([0.0] * 6 + [NOW + 1]),
        storage=tuple(lots.sample(STORAGES, lots.choice((0, 0, 1, 2)))),
        slow=lots.random() < 0.2,
        weight=lots.choice((0.5, 1.0, 1.0, 4.0)),
        egress_rate=lots.choice((None, None, 1e9, 5e8)),
        ingress_rate=lots.choice((None, 1e9, 3e8)),
    )


def reads(lots: Random, name: str, others: tuple[str, ...]) -> dict[str, tuple[Range, ...]]:
    """Each chunk from one source at most: a peer that may be dead or unknown, or its own storage."""
    sources = [lots.choice((name, "ghost", *others)) for _ in range(lots.randrange(4))]
    where = [lots.choice((*sources, None)) for _ in range(CHUNKS)]
    return {
        source: from_indices(chunk for chunk in range(CHUNKS) if where[chunk] == source) for source in sources
    }


def fleet_of(lots: Random, names: tuple[str, ...]) -> Group:
    """Any fleet, with any routes, even ones that run in circles."""
    members = [anybody(lots, name) for name in names if lots.random() < 0.7]
    able = {each.instance_id for each in members if each.storage and each.storage[0].kind != "loader"}
    told = {name: reads(lots, name, names) for name in names if lots.random() < 0.5}
    return group(
        *members,
        reads={
            name: {source: chunks for source, chunks in parts.items() if source != name or name in able}
            for name, parts in told.items()
        },
    )


def demand_of(lots: Random, fleet: Group, name: str) -> Demand:
    """Any demand of an instance, whether the planner knows it or not."""
    target = replace(
        anybody(lots, name), layout_id=LAYOUT, state="loading", expires_at=NOW + 1, quarantined_until=0.0
    )
    if lots.random() < 0.6 or target.verified == ALL:
        target = replace(target, verified=(), weights_id=None, draft=None)
    named = (*fleet.sources, name)
    blamed = {other: "x" for other in named if lots.random() < 0.1}
    current = fleet.shares.get(name, ()) if lots.random() < 0.7 else ()
    if lots.random() < 0.1:
        current = (*current, Share(lots.choice(named), some(lots)))
    if name in fleet.sources:
        target = replace(target, storage=fleet.sources[name].storage)
    return Demand(f"fork-{name}", target, blamed, current)


@given(seeds, st.integers(0, 10), st.integers(1, 40))
@settings(max_examples=400)
def test_every_decision_keeps_every_promise(lots: Random, members: int, number: int) -> None:
    """Whatever the fleet and whoever asks: see `audit` for what is promised."""
    fleet = fleet_of(lots, MEMBERS[:members])
    names = lots.sample([*MEMBERS, *(f"t{index:02}" for index in range(40))], number)
    # Who lost a source, or has a plan, is planned alone.
    demands = [replace(demand_of(lots, fleet, name), blamed={}, current=()) for name in names]
    assert [] == violations(fleet, demands, plan(fleet, demands, NOW), NOW)


@given(seeds, st.integers(0, 10))
@settings(max_examples=600)
def test_a_decision_made_alone_keeps_every_promise(lots: Random, members: int) -> None:
    """One demand at a time is what most requests are."""
    fleet = fleet_of(lots, MEMBERS[:members])
    demands = [demand_of(lots, fleet, lots.choice((*MEMBERS, "t")))]
    assert [] == violations(fleet, demands, plan(fleet, demands, NOW), NOW)


def blank(lots: Random, name: str) -> Source:
    """A target that holds nothing and may take two readers at least."""
    return loading(
        name,
        transports=lots.choice((("http",), ("http", "memory"), ("memory", "http"))),
        place=place(lots, name),
        max_readers=lots.randrange(2, 5),
        slow=lots.random() < 0.1,
        ingress_rate=lots.choice((None, 1e9, 3e8, 1e8)),
        storage=tuple(lots.sample(STORAGES, lots.choice((0, 0, 1, 2)))),
    )


@given(seeds, st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=400)
def test_nobody_is_left_without_a_source_while_a_seed_has_places(
    lots: Random, givers: int, number: int
) -> None:
    """Where each takes two readers at least, all targets stand somewhere behind the seeds."""
    members = [
        seed(
            f"s{index}", place=place(lots, f"s{index}"), max_readers=lots.randrange(2, 5),
            egress_rate=lots.choice((None, 1e9, 5e8)), weight=lots.choice((1.0, 4.0)),
        )
        for index in range(givers)
    ]  # fmt: skip
    busy = {f"x{index}": {"s0": ALL} for index in range(members[0].max_readers - 1)}
    fleet = group(*members, *(blank(lots, name) for name in busy), reads=busy)
    demands = [Demand(f"fork-t{index:02}", blank(lots, f"t{index:02}")) for index in range(number)]
    decisions = plan(fleet, demands, NOW)
    assert [] == violations(fleet, demands, decisions, NOW)
    assert {demand.fork_id: ALL for demand in demands} == {
        fork_id: covered(decision) for fork_id, decision in decisions.items()
    }


@given(seeds, st.integers(2, 40))
@settings(max_examples=300)
def test_a_cold_group_reads_storage_once(lots: Random, number: int) -> None:
    """Nobody holds anything: each byte is read from storage once, and all get all."""
    demands = [Demand(f"fork-t{index:02}", blank(lots, f"t{index:02}")) for index in range(number)]
    decisions = plan(group(), demands, NOW)
    assert [] == violations(group(), demands, decisions, NOW)
    able = any(demand.target.storage for demand in demands)
    read = [chunks for decision in decisions.values() for _, chunks in decision.storage]
    assert (number * [ALL if able else ()], able * CHUNKS) == (
        [covered(decision) for decision in decisions.values()],
        sum(end - begin for chunks in read for begin, end in chunks),
    )


@given(seeds, st.integers(0, 10), st.integers(1, 40))
@settings(max_examples=200)
def test_the_order_of_the_demands_does_not_matter(lots: Random, members: int, number: int) -> None:
    """The same demands in another order give the same decisions, and so do the same ones again."""
    fleet = fleet_of(lots, MEMBERS[:members])
    names = lots.sample([*MEMBERS, *(f"t{index:02}" for index in range(40))], number)
    demands = [demand_of(lots, fleet, name) for name in names]
    shuffled = lots.sample(demands, number)
    assert plan(fleet, demands, NOW) == plan(fleet, shuffled, NOW) == plan(fleet, demands, NOW)


@given(seeds, st.integers(0, 10), st.integers(1, 10))
@settings(max_examples=200)
def test_what_is_not_assigned_is_asked_for_again_or_explained(lots: Lots, members: int, number: int) -> None:
    """A decision that leaves chunks out says that asking again may help, or why nobody gives any."""
    fleet = fleet_of(lots, MEMBERS[:members])
    demands = [demand_of(lots, fleet, name) for name in lots.sample(MEMBERS, number)]
    decisions = plan(fleet, demands, NOW)
    for demand in demands:
        decision = decisions[demand.fork_id]
        if covered(decision) and covered(decision) != missing(demand):
            assert decision.full
