from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.policy.group_plan import plan
from planner.policy_types import ChunkShare, ForkDemand, GroupView, HostLocation, Source, Storage
from rfork.image.ranges import Range, from_indices
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
from tests.unit.planner.policy.invariants import covered, missing, violations

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


class SeededRandom(Random):
    """Whole fleets are drawn from one number: field by field would take a hundred times as long."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._number = number

    def __repr__(self) -> str:
        return f"Lots({self._number})"


rngs = st.integers(0, 2**32).map(SeededRandom)


def random_chunks(rng: Random) -> tuple[Range, ...]:
    """Any chunks, seldom none or all."""
    return from_indices(index for index in range(CHUNKS) if rng.random() < rng.choice((0.1, 0.5, 0.9)))


def random_placement(rng: Random, name: str) -> HostLocation:
    """A host that others may be on too, and labels that may be missing."""
    host = rng.choice((f"host-{name}", f"host-{name}", "h1", "h2"))
    nvlink = rng.choice((None, None, None, "n1", "n2"))
    return HostLocation(host, rng.choice((None, "r1", "r2")), rng.choice((None, "z1", "z2")), nvlink)


def random_source(rng: Random, name: str) -> Source:
    """Any instance that the planner may know."""
    weights_id, provisional_id = rng.choice(NAMES)
    return seed(
        name,
        layout_id=rng.choice([LAYOUT] * 6 + [OTHER_LAYOUT]),
        weights_id=weights_id,
        provisional_id=provisional_id,
        generation=rng.randrange(3),
        state=rng.choice(["serving"] * 4 + ["loading", "draining"]),
        verified=rng.choice((ALL, ALL, (), random_chunks(rng))),
        transports=rng.choice(TRANSPORTS),
        location=random_placement(rng, name),
        max_readers=rng.randrange(5),
        expires_at=rng.choice([NOW + 1] * 6 + [NOW]),
        quarantined_until=rng.choice([0.0] * 6 + [NOW + 1]),
        storage=tuple(rng.sample(STORAGES, rng.choice((0, 0, 1, 2)))),
        slow=rng.random() < 0.2,
        egress_share=rng.choice((0.5, 1.0, 1.0, 4.0)),
        egress_rate=rng.choice((None, None, 1e9, 5e8)),
        ingress_rate=rng.choice((None, 1e9, 3e8)),
    )


def random_reads(rng: Random, name: str, others: tuple[str, ...]) -> dict[str, tuple[Range, ...]]:
    """Each chunk from one source at most: a peer that may be dead or unknown, or its own storage."""
    sources = [rng.choice((name, "ghost", *others)) for _ in range(rng.randrange(4))]
    where = [rng.choice((*sources, None)) for _ in range(CHUNKS)]
    return {source: from_indices(chunk for chunk in range(CHUNKS) if where[chunk] == source) for source in sources}


def random_fleet(rng: Random, names: tuple[str, ...]) -> GroupView:
    """Any fleet, with any routes, even ones that run in circles."""
    members = [random_source(rng, name) for name in names if rng.random() < 0.7]
    storage_readers = {each.instance_id for each in members if each.storage and each.storage[0].kind != "loader"}
    planned_reads = {name: random_reads(rng, name, names) for name in names if rng.random() < 0.5}
    return group(
        *members,
        reads={
            name: {source: chunks for source, chunks in parts.items() if source != name or name in storage_readers}
            for name, parts in planned_reads.items()
        },
    )


def random_demand(rng: Random, fleet: GroupView, name: str) -> ForkDemand:
    """Any demand of an instance, whether the planner knows it or not."""
    target = replace(
        random_source(rng, name), layout_id=LAYOUT, state="loading", expires_at=NOW + 1, quarantined_until=0.0
    )
    if rng.random() < 0.6 or target.verified == ALL:
        target = replace(target, verified=(), weights_id=None, provisional_id=None)
    named = (*fleet.sources, name)
    blamed = {other: "x" for other in named if rng.random() < 0.1}
    current = fleet.shares.get(name, ()) if rng.random() < 0.7 else ()
    if rng.random() < 0.1:
        current = (*current, ChunkShare(rng.choice(named), random_chunks(rng)))
    if name in fleet.sources:
        target = replace(target, storage=fleet.sources[name].storage)
    return ForkDemand(f"fork-{name}", target, blamed, current)


@given(rngs, st.integers(0, 10), st.integers(1, 40))
@settings(max_examples=400)
def test_every_decision_keeps_every_promise(rng: Random, members: int, number: int) -> None:
    """Whatever the fleet and whoever asks: see `audit` for what is promised."""
    fleet = random_fleet(rng, MEMBERS[:members])
    names = rng.sample([*MEMBERS, *(f"t{index:02}" for index in range(40))], number)
    # Who lost a source, or has a plan, is planned alone.
    demands = [replace(random_demand(rng, fleet, name), excluded={}, current_shares=()) for name in names]
    assert [] == violations(fleet, demands, plan(fleet, demands, NOW), NOW)


@given(rngs, st.integers(0, 10))
@settings(max_examples=600)
def test_a_decision_made_alone_keeps_every_promise(rng: Random, members: int) -> None:
    """One demand at a time is what most requests are."""
    fleet = random_fleet(rng, MEMBERS[:members])
    demands = [random_demand(rng, fleet, rng.choice((*MEMBERS, "t")))]
    assert [] == violations(fleet, demands, plan(fleet, demands, NOW), NOW)


def empty_target(rng: Random, name: str) -> Source:
    """A target that holds nothing and may take two readers at least."""
    return loading(
        name,
        transports=rng.choice((("http",), ("http", "memory"), ("memory", "http"))),
        location=random_placement(rng, name),
        max_readers=rng.randrange(2, 5),
        slow=rng.random() < 0.1,
        ingress_rate=rng.choice((None, 1e9, 3e8, 1e8)),
        storage=tuple(rng.sample(STORAGES, rng.choice((0, 0, 1, 2)))),
    )


@given(rngs, st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=400)
def test_nobody_is_left_without_a_source_while_a_seed_has_places(rng: Random, seed_count: int, number: int) -> None:
    """Where each takes two readers at least, all targets stand somewhere behind the seeds."""
    members = [
        seed(
            f"s{index}", location=random_placement(rng, f"s{index}"), max_readers=rng.randrange(2, 5),
            egress_rate=rng.choice((None, 1e9, 5e8)), egress_share=rng.choice((1.0, 4.0)),
        )
        for index in range(seed_count)
    ]  # fmt: skip
    busy = {f"x{index}": {"s0": ALL} for index in range(members[0].max_readers - 1)}
    fleet = group(*members, *(empty_target(rng, name) for name in busy), reads=busy)
    demands = [ForkDemand(f"fork-t{index:02}", empty_target(rng, f"t{index:02}")) for index in range(number)]
    decisions = plan(fleet, demands, NOW)
    assert [] == violations(fleet, demands, decisions, NOW)
    assert {demand.fork_id: ALL for demand in demands} == {
        fork_id: covered(decision) for fork_id, decision in decisions.items()
    }


@given(rngs, st.integers(2, 40))
@settings(max_examples=300)
def test_a_cold_group_reads_storage_once(rng: Random, number: int) -> None:
    """Nobody holds anything: each byte is read from storage once, and all get all."""
    demands = [ForkDemand(f"fork-t{index:02}", empty_target(rng, f"t{index:02}")) for index in range(number)]
    decisions = plan(group(), demands, NOW)
    assert [] == violations(group(), demands, decisions, NOW)
    storage_readers = any(demand.target.storage for demand in demands)
    read = [chunks for decision in decisions.values() for _, chunks in decision.storage]
    assert (number * [ALL if storage_readers else ()], storage_readers * CHUNKS) == (
        [covered(decision) for decision in decisions.values()],
        sum(end - begin for chunks in read for begin, end in chunks),
    )


@given(rngs, st.integers(0, 10), st.integers(1, 40))
@settings(max_examples=200)
def test_the_order_of_the_demands_does_not_matter(rng: Random, members: int, number: int) -> None:
    """The same demands in another order give the same decisions, and so do the same ones again."""
    fleet = random_fleet(rng, MEMBERS[:members])
    names = rng.sample([*MEMBERS, *(f"t{index:02}" for index in range(40))], number)
    demands = [random_demand(rng, fleet, name) for name in names]
    shuffled = rng.sample(demands, number)
    assert plan(fleet, demands, NOW) == plan(fleet, shuffled, NOW) == plan(fleet, demands, NOW)


@given(rngs, st.integers(0, 10), st.integers(1, 10))
@settings(max_examples=200)
def test_what_is_not_assigned_is_asked_for_again_or_explained(rng: SeededRandom, members: int, number: int) -> None:
    """A decision that leaves chunks out says that asking again may help, or why nobody gives any."""
    fleet = random_fleet(rng, MEMBERS[:members])
    demands = [random_demand(rng, fleet, name) for name in rng.sample(MEMBERS, number)]
    decisions = plan(fleet, demands, NOW)
    for demand in demands:
        decision = decisions[demand.fork_id]
        if covered(decision) and covered(decision) != missing(demand):
            assert decision.no_free_slot
