from __future__ import annotations

from dataclasses import replace

import pytest

from planner.policy.group_plan import plan
from planner.policy_types import ChunkShare, ForkDemand, PlanDecision, Source, Storage
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
    """A target whose chunks come from a checkpoint that is not sealed yet."""
    return loading(name, *verified, **({"weights_id": None, "provisional_id": ORIGIN} | changes))


def test_a_few_share_a_snapshot_in_a_ring() -> None:
    """Three of thirty chunks each: each reads its third, and takes the rest from the one before it."""
    thirds = ((0, 10),), ((10, 20),), ((20, 30),)
    arrivals = targets(3, chunk_count=30, storage=(SNAPSHOT,))
    assert {
        "t00": {"snapshot": thirds[0], "t02": ((10, 30),)},
        "t01": {"snapshot": thirds[1], "t00": ((0, 10), (20, 30))},
        "t02": {"snapshot": thirds[2], "t01": ((0, 20),)},
    } == plan_together(group(), *arrivals)


def test_of_many_the_two_roots_read_a_half_each() -> None:
    """The storage is read once, by two."""
    reads = plan_together(group(), *targets(40, storage=(SNAPSHOT,)))
    roots = sorted(parts["snapshot"] for parts in reads.values() if "snapshot" in parts)
    assert [((0, 6),), ((6, 12),)] == roots


@pytest.mark.parametrize("number", [2, 3, 5, 13, 40])
@pytest.mark.parametrize("storage", [SNAPSHOT, CHECKPOINT, LOADER])
def test_storage_gives_each_byte_once(number: int, storage: Storage) -> None:
    """Whatever the storage, and however many wait."""
    reads = plan_together(group(), *targets(number, storage=(storage,)))
    read = sum(count(parts[storage.kind]) for parts in reads.values() if storage.kind in parts)
    assert (12, [12] * number) == (
        read,
        [sum(count(chunks) for chunks in parts.values()) for parts in reads.values()],
    )


@pytest.mark.parametrize("storage", [CHECKPOINT, LOADER])
def test_one_is_elected_where_chunks_cannot_be_told_right_from_wrong(storage: Storage) -> None:
    """The others stand behind it while it reads."""
    expected = {"t00": {storage.kind: ALL}, "t01": {"t00": ALL}}
    assert expected == plan_together(group(), *targets(2, storage=(storage,)))


def test_all_behind_a_checkpoint_know_its_origin() -> None:
    """They are told what their chunks will be of before anybody knows the weights."""
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
def test_who_is_elected(elected: str, members: dict[str, dict[str, object]]) -> None:
    """Those that others can wait for; then snapshot, checkpoint, loader; then speed, slots, name."""
    reads = plan_together(group(), *(loading(name, **changes) for name, changes in members.items()))
    assert [elected] == [name for name, parts in reads.items() if set(parts) - set(members)]


def test_without_storage_offers_nobody_is_elected() -> None:
    """Each falls back by itself: that is what `own` asks for."""
    assert {"t00": {}, "t01": {}} == plan_together(group(), *targets(2))


def test_one_whose_own_storage_failed_is_not_elected_again() -> None:
    """The other is, and the first stands behind it."""
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
def test_one_waits_for_who_waits_for_it_and_could_read_storage(
    elected: bool, storage: tuple[Storage, ...], waits: bool
) -> None:
    """Who says so could; and where one was elected and cannot, who has not been asked: they will be."""
    fleet = group(follower("a", (0, 5)), follower("b", (0, 4), storage=storage), reads={"b": {"a": ALL}})
    fork_demand = replace(demand(follower("a", (0, 5))), is_elected_reader=elected)
    decision = plan(fleet, [fork_demand], NOW)[fork_demand.fork_id]
    assert ({}, waits) == (routes(decision), decision.no_free_slot)


def test_with_a_seed_at_hand_nobody_reads_storage() -> None:
    """Not even those that could."""
    reads = plan_together(group(seed("s")), *targets(3, storage=(SNAPSHOT,)))
    assert {"s", "t00", "t01", "t02"} >= {name for parts in reads.values() for name in parts}


def test_the_second_to_come_stands_behind_the_one_that_was_elected() -> None:
    """It has told nothing yet, and is read from by its plan."""
    fleet = group(loading("a", storage=(CHECKPOINT,)), reads={"a": {"a": ALL}})
    assert {"a": ALL} == routes(decide(fleet, loading("b", storage=(CHECKPOINT,))))


def test_who_finds_the_elected_one_full_waits() -> None:
    """Storage is read once, even so."""
    reads: Reads = {"a": {"a": ALL}, "x": {"a": ALL}}
    fleet = group(loading("a", max_readers=1), loading("x", max_readers=0), reads=reads)
    decision = decide(fleet, loading("b", storage=(CHECKPOINT,)))
    assert ({}, True) == (routes(decision), decision.no_free_slot)


def test_chunks_that_a_full_one_reads_are_not_read_again() -> None:
    """Others give some of the rest: what is left is waited for, not read from storage."""
    reads: Reads = {"a": {"a": ALL}, "x": {"a": ALL}}
    fleet = group(
        follower("a", (0, 1), max_readers=1), follower("x", max_readers=0), follower("b", (0, 3)), reads=reads
    )
    decision = decide(fleet, loading("t", storage=(CHECKPOINT,)))
    assert ({"b": ((0, 3),)}, True) == (routes(decision), decision.no_free_slot)


def test_a_dead_leader_is_replaced_without_starting_again() -> None:
    """Its first follower reads from storage only what nobody holds."""
    fleet = group(follower("b", (0, 5)), follower("c", (0, 7)), reads={"b": {"a": ALL}, "c": {"b": ALL}})
    decision = decide(fleet, follower("b", (0, 5), storage=(CHECKPOINT,)), a="SourceUnavailable")
    assert ({"c": ((5, 7),), "checkpoint": ((7, 12),)}, ORIGIN) == (routes(decision), decision.provisional_id)


def test_the_next_follower_stays_behind_the_new_leader() -> None:
    """Storage is not read by two."""
    reads: Reads = {"b": {"b": ((5, 12),)}, "c": {"b": ALL}}
    fleet = group(follower("b", (0, 5)), follower("c", (0, 4)), reads=reads)
    decision = decide(fleet, follower("c", (0, 4), storage=(CHECKPOINT,)), a="SourceUnavailable")
    assert {"b": ((4, 12),)} == routes(decision)


def test_a_newcomer_fills_what_a_dead_leader_left_from_the_same_files() -> None:
    """It takes what the followers hold, and reads the rest."""
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
    """What is not known to be the same is read whole; one that has begun does not read it at all."""
    fleet = group(holder)
    fresh = decide(fleet, loading("t", storage=(storage,)))
    begun = replace(holder, instance_id="t", verified=((0, 3),), storage=(storage,))
    assert ({storage.kind: ALL}, {"b": ((3, 5),)}) == (routes(fresh), routes(decide(fleet, begun)))
    assert (storage.weights_id, storage.origin if storage.kind == "checkpoint" else None) == (
        fresh.weights_id, fresh.provisional_id,
    )  # fmt: skip


def test_who_reads_storage_goes_on_doing_so() -> None:
    """A seed that has come up meanwhile does not take the chunks that it reads for all."""
    target = loading("t", (0, 3), storage=(SNAPSHOT,))
    fleet = group(seed("s"), target, reads={"t": {"t": ((0, 6),)}})
    assert {"snapshot": ((3, 6),), "s": ((6, 12),)} == routes(decide(fleet, target))


def test_the_loader_is_called_for_everything_or_not_at_all() -> None:
    """Neither beside a peer nor by one that holds chunks, whatever it says it reads now."""
    fork_demand = ForkDemand("fork-t", loading("t", storage=(LOADER,)), {}, (ChunkShare("t", ((0, 6),)),))
    begun = replace(fork_demand, target=loading("t", (0, 3), storage=(LOADER,)))
    decisions = [plan(group(), [each], NOW)["fork-t"] for each in (fork_demand, begun)]
    assert [{"loader": ALL}, {}] == [routes(each) for each in decisions]


def test_weights_that_nobody_gives_any_more_do_not_part_the_group() -> None:
    """A seed of other weights drains: all that come read one checkpoint together."""
    fleet = group(seed("old", state="draining"), follower("a", (0, 2), storage=(CHECKPOINT,)), reads={"a": {"a": ALL}})
    assert {"a": ALL} == routes(decide(fleet, loading("b", storage=(CHECKPOINT,))))


def test_targets_that_reported_themselves_before_they_asked_share_the_snapshot_too() -> None:
    """That they are known does not make them holders."""
    arrivals = targets(2, chunk_count=20, storage=(SNAPSHOT,))
    low, high = ((0, 10),), ((10, 20),)
    expected = {"t00": {"snapshot": low, "t01": high}, "t01": {"snapshot": high, "t00": low}}
    assert expected == plan_together(group(*arrivals), *arrivals)


def test_a_batch_behind_a_seed_that_drains_reads_storage_once() -> None:
    """Nobody may read from the seed; the first reads storage and the others from it."""
    arrivals = targets(3, storage=(CHECKPOINT,))
    demands = [demand(target) for target in arrivals]
    fleet = group(seed("s", state="draining"))
    decisions: dict[str, PlanDecision] = plan(fleet, demands, NOW)
    assert [] == violations(fleet, demands, decisions, NOW)
    assert 1 == sum(bool(each.storage) for each in decisions.values())
    assert WEIGHTS not in {each.weights_id for each in decisions.values()}


def test_after_a_loader_that_made_no_seed_each_runs_its_own() -> None:
    """Nobody stands behind a loader any more: it gave nothing, and one after another would take for ever."""
    arrivals = targets(3, storage=(LOADER,))
    assert {target.instance_id: {"loader": ALL} for target in arrivals} == plan_together(
        replace(group(), loader_only=True), *arrivals
    )


def test_what_is_read_from_one_storage_is_told_once() -> None:
    """A target that goes on with a part, and is given another, reads one storage."""
    target = loading("t", storage=(SNAPSHOT,))
    fork_demand = ForkDemand("fork-t", target, {}, (ChunkShare("t", ((0, 3),)),))
    assert [(SNAPSHOT, ALL)] == list(plan(group(), [fork_demand], NOW)["fork-t"].storage)
