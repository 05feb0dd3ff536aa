"""Invariants of plans for random groups."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.policy.group_plan import plan
from planner.policy.types import ChunkShare, ForkDemand, GroupView, HostLocation, Source, Storage
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
    """Generates complete fleets from one number: drawing each field would be a hundred times slower."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._number = number

    def __repr__(self) -> str:
        return f"Lots({self._number})"


rngs = st.integers(0, 2**32).map(SeededRandom)


def random_chunks(rng: Random) -> tuple[Range, ...]:
    """Return random chunks, seldom none or all."""
    return from_indices(index for index in range(CHUNKS) if rng.random() < rng.choice((0.1, 0.5, 0.9)))


def random_placement(rng: Random, name: str) -> HostLocation:
    """Return a host that others may share, with optional labels."""
    host = rng.choice((f"host-{name}", f"host-{name}", "h1", "h2"))
    nvlink = rng.choice((None, None, None, "n1", "n2"))
    return HostLocation(host, rng.choice((None, "r1", "r2")), rng.choice((None, "z1", "z2")), nvlink)


def random_source(rng: Random, name: str) -> Source:
    """Return a random instance."""
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
    """Assign each chunk to at most one source: a peer that may be expired or unknown, or its own storage."""
    sources = [rng.choice((name, "ghost", *others)) for _ in range(rng.randrange(4))]
    where = [rng.choice((*sources, None)) for _ in range(CHUNKS)]
    return {source: from_indices(chunk for chunk in range(CHUNKS) if where[chunk] == source) for source in sources}


def random_fleet(rng: Random, names: tuple[str, ...]) -> GroupView:
    """Return a random fleet with random routes, including cycles."""
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
    """Return a random demand of a known or unknown instance."""
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
@settings(max_examples=150)
def test_every_decision_satisfies_the_invariants(rng: Random, members: int, number: int) -> None:
    """`violations` finds nothing in any fleet, for any demands."""
    fleet = random_fleet(rng, MEMBERS[:members])
    names = rng.sample([*MEMBERS, *(f"t{index:02}" for index in range(40))], number)
    # A target that lost a source, or has a plan, is planned alone.
    demands = [replace(random_demand(rng, fleet, name), excluded={}, current_shares=()) for name in names]
    assert [] == violations(fleet, demands, plan(fleet, demands, NOW), NOW)


@given(rngs, st.integers(0, 10))
@settings(max_examples=100)
def test_a_single_decision_satisfies_the_invariants(rng: Random, members: int) -> None:
    """Most requests are single demands."""
    fleet = random_fleet(rng, MEMBERS[:members])
    demands = [random_demand(rng, fleet, rng.choice((*MEMBERS, "t")))]
    assert [] == violations(fleet, demands, plan(fleet, demands, NOW), NOW)


def empty_target(rng: Random, name: str) -> Source:
    """Return a target without chunks and with at least two reader slots."""
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
@settings(max_examples=150)
def test_every_target_gets_a_source_while_slots_are_free(rng: Random, seed_count: int, number: int) -> None:
    """If each target accepts at least two readers, all are connected to the seeds."""
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
@settings(max_examples=100)
def test_a_cold_group_reads_storage_once(rng: Random, number: int) -> None:
    """Without holders, each byte is read from storage once, and every target receives everything."""
    demands = [ForkDemand(f"fork-t{index:02}", empty_target(rng, f"t{index:02}")) for index in range(number)]
    decisions = plan(group(), demands, NOW)
    assert [] == violations(group(), demands, decisions, NOW)
    storage_readers = any(demand.target.storage for demand in demands)
    read = [chunks for decision in decisions.values() for _, chunks in decision.storage]
    assert number * [ALL if storage_readers else ()] == [covered(decision) for decision in decisions.values()]
    assert storage_readers * CHUNKS == sum(end - begin for chunks in read for begin, end in chunks)


@given(rngs, st.integers(0, 10), st.integers(1, 40))
@settings(max_examples=100)
def test_the_order_of_the_demands_does_not_matter(rng: Random, members: int, number: int) -> None:
    """The same demands in another order, or repeated, yield the same decisions."""
    fleet = random_fleet(rng, MEMBERS[:members])
    names = rng.sample([*MEMBERS, *(f"t{index:02}" for index in range(40))], number)
    demands = [random_demand(rng, fleet, name) for name in names]
    shuffled = rng.sample(demands, number)
    assert plan(fleet, demands, NOW) == plan(fleet, shuffled, NOW) == plan(fleet, demands, NOW)


@given(rngs, st.integers(0, 10), st.integers(1, 10))
@settings(max_examples=100)
def test_unassigned_chunks_cause_a_retry_or_a_reason(rng: SeededRandom, members: int, number: int) -> None:
    """A decision that omits chunks suggests a retry, or explains why no source serves them."""
    fleet = random_fleet(rng, MEMBERS[:members])
    demands = [random_demand(rng, fleet, name) for name in rng.sample(MEMBERS, number)]
    decisions = plan(fleet, demands, NOW)
    for demand in demands:
        decision = decisions[demand.fork_id]
        if covered(decision) and covered(decision) != missing(demand):
            assert decision.no_free_slot
