"""Groups without a seed: the targets that read storage, and those that wait for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.policy.group_plan import plan
from planner.policy.types import ChunkShare, ForkDemand, PlanDecision, Source, Storage
from rfork.image.ranges import Range, count
from tests.unit.planner.builders import (
    CHECKPOINT,
    LOADER,
    NOW,
    ORIGIN,
    OTHER_ORIGIN,
    OTHER_WEIGHTS,
    SNAPSHOT,
    WEIGHTS,
    Reads,
    decide,
    demand,
    group,
    loading,
    plan_together,
    routes,
    seed,
    targets,
)
from tests.unit.planner.policy.invariants import violations

ALL = ((0, 12),)
OTHER_SNAPSHOT = Storage("snapshot", "file:///o", OTHER_ORIGIN, OTHER_WEIGHTS)
OTHER_CHECKPOINT = Storage("checkpoint", "file:///o", OTHER_ORIGIN)


def follower(name: str, *verified: Range, **changes: object) -> Source:
    """Return a target with chunks of a checkpoint whose weights are not final yet."""
    return loading(name, *verified, **({"weights_id": None, "provisional_id": ORIGIN} | changes))


def test_few_targets_share_a_snapshot_in_a_ring() -> None:
    """Each of three reads a third from storage and the rest from its predecessor."""
    thirds = ((0, 10),), ((10, 20),), ((20, 30),)
    arrivals = targets(3, chunk_count=30, storage=(SNAPSHOT,))
    assert {
        "t00": {"snapshot": thirds[0], "t02": ((10, 30),)},
        "t01": {"snapshot": thirds[1], "t00": ((0, 10), (20, 30))},
        "t02": {"snapshot": thirds[2], "t01": ((0, 20),)},
    } == plan_together(group(), *arrivals)


def test_in_a_large_group_the_two_roots_read_half_each() -> None:
    """Storage is read once, by two targets."""
    reads = plan_together(group(), *targets(40, storage=(SNAPSHOT,)))
    roots = sorted(parts["snapshot"] for parts in reads.values() if "snapshot" in parts)
    assert [((0, 6),), ((6, 12),)] == roots


@pytest.mark.parametrize("number", [2, 3, 5, 13, 40])
@pytest.mark.parametrize("storage", [SNAPSHOT, CHECKPOINT, LOADER])
def test_storage_is_read_once(number: int, storage: Storage) -> None:
    """This is true for any storage and any number of targets."""
    reads = plan_together(group(), *targets(number, storage=(storage,)))
    read = sum(count(parts[storage.kind]) for parts in reads.values() if storage.kind in parts)
    assert 12 == read
    assert [12] * number == [sum(count(chunks) for chunks in parts.values()) for parts in reads.values()]


@pytest.mark.parametrize("storage", [CHECKPOINT, LOADER])
def test_one_target_is_elected_if_chunks_cannot_be_verified(storage: Storage) -> None:
    """The others read from it meanwhile."""
    expected = {"t00": {storage.kind: ALL}, "t01": {"t00": ALL}}
    assert expected == plan_together(group(), *targets(2, storage=(storage,)))


def test_all_readers_of_a_checkpoint_know_its_origin() -> None:
    """Their plans contain it before the weights are known."""
    decisions = plan(group(), [demand(target) for target in targets(3, storage=(CHECKPOINT,))], NOW)
    assert [(None, ORIGIN)] * 3 == [(each.weights_id, each.provisional_id) for each in decisions.values()]


ELECTIONS: list[tuple[str, dict[str, dict[str, object]]]] = [
    ("b", {"a": {}, "b": {"storage": (LOADER,)}}),
    ("b", {"a": {"storage": (LOADER,)}, "b": {"storage": (CHECKPOINT,)}}),
    ("b", {"a": {"storage": (CHECKPOINT,)}, "b": {"storage": (SNAPSHOT,)}}),
    ("a", {"a": {"storage": (CHECKPOINT, SNAPSHOT)}, "b": {"storage": (LOADER,)}}),
    ("b", {"a": {"storage": (SNAPSHOT,), "slow": True}, "b": {"storage": (SNAPSHOT,)}}),
    ("b", {"a": {"storage": (CHECKPOINT,), "slow": True}, "b": {"storage": (LOADER,)}}),
    ("b", {"a": {"storage": (LOADER,)}, "b": {"storage": (LOADER,), "ingress_rate": 1e9}}),
    ("b", {"a": {"storage": (LOADER,)}, "b": {"storage": (LOADER,), "max_readers": 3}}),
    ("b", {"a": {"storage": (CHECKPOINT,), "max_readers": 0}, "b": {"storage": (LOADER,)}}),
    ("a", {"a": {"storage": (SNAPSHOT,), "slow": True}, "b": {}}),
]


@pytest.mark.parametrize(("elected", "members"), ELECTIONS)
def test_the_target_with_the_best_storage_is_elected(elected: str, members: dict[str, dict[str, object]]) -> None:
    """Targets with reader slots first; then snapshot, checkpoint, loader; then speed, slots, name."""
    reads = plan_together(group(), *(loading(name, **changes) for name, changes in members.items()))
    assert [elected] == [name for name, parts in reads.items() if set(parts) - set(members)]


def test_without_storage_no_target_is_elected() -> None:
    """Each falls back on its own, as with independent cold starts."""
    assert {"t00": {}, "t01": {}} == plan_together(group(), *targets(2))


def test_a_target_whose_storage_failed_is_not_elected_again() -> None:
    """The other is elected, and the first reads from it."""
    first, second = targets(2, storage=(CHECKPOINT,))
    demands = [demand(first, t00="StorageError"), demand(second)]
    decisions = plan(group(), demands, NOW)
    assert [{"t01": ALL}, {"checkpoint": ALL}] == [routes(decisions[each.fork_id]) for each in demands]


@pytest.mark.parametrize(
    ("elected", "storage", "waits"),
    [
        (True, (), True),
        (False, (CHECKPOINT,), True),
        (False, (OTHER_CHECKPOINT,), False),
        (False, (), False),
    ],
)
def test_a_target_waits_for_a_follower_that_could_read_storage(
    elected: bool, storage: tuple[Storage, ...], waits: bool
) -> None:
    """The follower reported storage, or is assumed to have some because this target was elected and failed."""
    fleet = group(follower("a", (0, 5)), follower("b", (0, 4), storage=storage), reads={"b": {"a": ALL}})
    fork_demand = replace(demand(follower("a", (0, 5))), is_elected_reader=elected)
    decision = plan(fleet, [fork_demand], NOW)[fork_demand.fork_id]
    assert {} == routes(decision)
    assert waits == decision.no_free_slot


def test_with_a_seed_no_target_reads_storage() -> None:
    """This includes targets that could."""
    reads = plan_together(group(seed("s")), *targets(3, storage=(SNAPSHOT,)))
    assert {"s", "t00", "t01", "t02"} >= {name for parts in reads.values() for name in parts}


def test_a_later_target_reads_from_the_elected_one() -> None:
    """The elected target has reported no chunks yet, and is read from because of its plan."""
    fleet = group(loading("a", storage=(CHECKPOINT,)), reads={"a": {"a": ALL}})
    assert {"a": ALL} == routes(decide(fleet, loading("b", storage=(CHECKPOINT,))))


def test_a_target_waits_for_a_full_elected_reader() -> None:
    """Storage is still read only once."""
    reads: Reads = {"a": {"a": ALL}, "x": {"a": ALL}}
    fleet = group(loading("a", max_readers=1), loading("x", max_readers=0), reads=reads)
    decision = decide(fleet, loading("b", storage=(CHECKPOINT,)))
    assert {} == routes(decision)
    assert decision.no_free_slot


def test_chunks_of_a_full_source_are_not_read_from_storage() -> None:
    """Other sources serve some of the rest; the target waits for the remainder."""
    reads: Reads = {"a": {"a": ALL}, "x": {"a": ALL}}
    fleet = group(
        follower("a", (0, 1), max_readers=1), follower("x", max_readers=0), follower("b", (0, 3)), reads=reads
    )
    decision = decide(fleet, loading("t", storage=(CHECKPOINT,)))
    assert {"b": ((0, 3),)} == routes(decision)
    assert decision.no_free_slot


def test_a_removed_leader_is_replaced_without_restarting() -> None:
    """Its first follower reads from storage only the chunks that no instance has."""
    fleet = group(follower("b", (0, 5)), follower("c", (0, 7)), reads={"b": {"a": ALL}, "c": {"b": ALL}})
    decision = decide(fleet, follower("b", (0, 5), storage=(CHECKPOINT,)), a="SourceUnavailable")
    assert {"c": ((5, 7),), "checkpoint": ((7, 12),)} == routes(decision)
    assert ORIGIN == decision.provisional_id


def test_the_next_follower_reads_from_the_new_leader() -> None:
    """Storage is not read by two."""
    reads: Reads = {"b": {"b": ((5, 12),)}, "c": {"b": ALL}}
    fleet = group(follower("b", (0, 5)), follower("c", (0, 4)), reads=reads)
    decision = decide(fleet, follower("c", (0, 4), storage=(CHECKPOINT,)), a="SourceUnavailable")
    assert {"b": ((4, 12),)} == routes(decision)


def test_a_new_target_reads_what_a_removed_leader_left_from_the_same_files() -> None:
    """It receives the followers' chunks, and reads the rest from storage."""
    fleet = group(follower("b", (0, 5)), reads={"b": {"a": ALL}})
    decision = decide(fleet, loading("t", storage=(CHECKPOINT,)))
    assert {"b": ((0, 5),), "checkpoint": ((5, 12),)} == routes(decision)


MIXES: list[tuple[Source, Storage]] = [
    (loading("b", (0, 5)), OTHER_SNAPSHOT),
    (loading("b", (0, 5)), CHECKPOINT),
    (loading("b", (0, 5)), LOADER),
    (follower("b", (0, 5)), OTHER_CHECKPOINT),
    (follower("b", (0, 5)), SNAPSHOT),
    (follower("b", (0, 5)), LOADER),
]


@pytest.mark.parametrize(("holder", "storage"), MIXES)
def test_chunks_of_different_files_are_never_mixed(holder: Source, storage: Storage) -> None:
    """Storage that may differ is read completely; a target that has begun does not read it."""
    fleet = group(holder)
    fresh = decide(fleet, loading("t", storage=(storage,)))
    begun = replace(holder, instance_id="t", verified=((0, 3),), storage=(storage,))
    assert {storage.kind: ALL} == routes(fresh)
    assert {"b": ((3, 5),)} == routes(decide(fleet, begun))
    assert storage.weights_id == fresh.weights_id
    assert (storage.origin if storage.kind == "checkpoint" else None) == fresh.provisional_id


def test_a_storage_reader_continues() -> None:
    """A new seed does not replace the storage reads that others depend on."""
    target = loading("t", (0, 3), storage=(SNAPSHOT,))
    fleet = group(seed("s"), target, reads={"t": {"t": ((0, 6),)}})
    assert {"snapshot": ((3, 6),), "s": ((6, 12),)} == routes(decide(fleet, target))


def test_a_loader_is_called_for_everything_or_not_at_all() -> None:
    """It is not combined with a peer or with existing chunks, whatever the target reports."""
    fork_demand = ForkDemand("fork-t", loading("t", storage=(LOADER,)), {}, (ChunkShare("t", ((0, 6),)),))
    begun = replace(fork_demand, target=loading("t", (0, 3), storage=(LOADER,)))
    decisions = [plan(group(), [each], NOW)["fork-t"] for each in (fork_demand, begun)]
    assert [{"loader": ALL}, {}] == [routes(each) for each in decisions]


def test_weights_that_are_no_longer_served_do_not_split_the_group() -> None:
    """A seed of other weights drains: all new targets share one checkpoint."""
    fleet = group(seed("old", state="draining"), follower("a", (0, 2), storage=(CHECKPOINT,)), reads={"a": {"a": ALL}})
    assert {"a": ALL} == routes(decide(fleet, loading("b", storage=(CHECKPOINT,))))


def test_registered_targets_share_the_snapshot_too() -> None:
    """Targets known before their request do not count as holders."""
    arrivals = targets(2, chunk_count=20, storage=(SNAPSHOT,))
    low, high = ((0, 10),), ((10, 20),)
    expected = {"t00": {"snapshot": low, "t01": high}, "t01": {"snapshot": high, "t00": low}}
    assert expected == plan_together(group(*arrivals), *arrivals)


def test_a_batch_with_a_draining_seed_reads_storage_once() -> None:
    """The seed accepts no readers; the first target reads storage, the others read from it."""
    arrivals = targets(3, storage=(CHECKPOINT,))
    demands = [demand(target) for target in arrivals]
    fleet = group(seed("s", state="draining"))
    decisions: dict[str, PlanDecision] = plan(fleet, demands, NOW)
    assert [] == violations(fleet, demands, decisions, NOW)
    assert 1 == sum(bool(each.storage) for each in decisions.values())
    assert WEIGHTS not in {each.weights_id for each in decisions.values()}


def test_after_a_loader_that_made_no_seed_each_target_loads() -> None:
    """Targets no longer wait for a loader that serves nothing."""
    arrivals = targets(3, storage=(LOADER,))
    assert {target.instance_id: {"loader": ALL} for target in arrivals} == plan_together(
        replace(group(), loader_only=True), *arrivals
    )


def test_reads_from_one_storage_are_merged() -> None:
    """A target that continues one part and is assigned another has one storage assignment."""
    target = loading("t", storage=(SNAPSHOT,))
    fork_demand = ForkDemand("fork-t", target, {}, (ChunkShare("t", ((0, 3),)),))
    assert [(SNAPSHOT, ALL)] == list(plan(group(), [fork_demand], NOW)["fork-t"].storage)
