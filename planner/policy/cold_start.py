"""Cold start: elects the targets that read storage when no instance has the image.

Chunks of a snapshot can be verified immediately, so several targets share the read: they form a ring, in
which each reads its part from storage and the rest from its predecessor; in large groups, the roots of the
two trees read half each. Readers are spread over as many nodes as possible; the other targets of a node read
from theirs. Otherwise one target is elected: it reads its checkpoint or calls its loader, and the others read
from it meanwhile. Either way, storage serves every byte once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Final

from planner.policy import reasons
from planner.policy.chunk_split import split, to_assignments
from planner.policy.fanout import CHAIN_CHUNK_RATIO, locality_key, node_of, plan_fanout, two_trees
from planner.policy.plan_state import PlanState
from planner.policy.types import ForkDemand, PlanDecision, Storage
from planner.policy.weights import storage_for_missing_chunks, with_requested_weights
from rfork.image.ranges import Range, subtract

STORAGE_PREFERENCE: Final = {"snapshot": 0, "checkpoint": 1, "loader": 2}


def elect_storage_readers(state: PlanState, demands: Sequence[ForkDemand]) -> list[ForkDemand]:
    """Plan targets without chunks and without a source; return those that are still unplanned.

    All have the same layout and the same transports.
    """
    eligible = {
        demand.fork_id: storage
        for demand in demands
        if demand.target.instance_id not in demand.excluded and (storage := storage_for_missing_chunks(demand.target))
    }
    if not eligible:
        return list(demands)
    snapshots = Counter(storage.weights_id for storage in eligible.values() if storage.kind == "snapshot")
    if snapshots:
        weights_id = max(snapshots, key=lambda weights_id: (snapshots[weights_id], weights_id))
        readers = [
            with_requested_weights(demand, weights_id, None)
            for demand in demands
            if demand.fork_id in eligible and eligible[demand.fork_id].weights_id == weights_id
        ]
        readers = [demand for demand in readers if not demand.target.slow] or readers
        readers = _stripe_snapshot(state, readers, eligible)
    else:
        elected = min(
            (demand for demand in demands if demand.fork_id in eligible),
            key=lambda each: _score(each, eligible),
        )
        storage = eligible[elected.fork_id]
        weights_id, readers = (
            None,
            [with_requested_weights(elected, None, storage.origin if storage.kind == "checkpoint" else None)],
        )
        _ring(state, readers, eligible)
    provisional_id = readers[0].target.provisional_id
    planned = {demand.fork_id for demand in readers}
    unplanned = [
        with_requested_weights(demand, weights_id, provisional_id)
        for demand in demands
        if demand.fork_id not in planned
    ]
    left: list[ForkDemand] = []
    remote: list[ForkDemand] = []
    for node, members in groupby(sorted(unplanned, key=node_of), key=node_of):
        co_located = [demand.target for demand in readers if node_of(demand) == node]
        if co_located:
            left += plan_fanout(state, list(members), co_located)
        else:
            remote += members
    return left + (plan_fanout(state, remote, [demand.target for demand in readers]) if remote else [])


def _stripe_snapshot(state: PlanState, readers: list[ForkDemand], eligible: Mapping[str, Storage]) -> list[ForkDemand]:
    """Let as many targets as possible read the snapshot together; return those that are planned."""
    chunk_count = readers[0].target.chunk_count
    nodes = [list(members) for _, members in groupby(sorted(readers, key=node_of), key=node_of)]
    leaders = [max(members, key=lambda demand: state.free_slots(demand.target)) for members in nodes]
    with_slots = [
        leader
        for leader, members in zip(leaders, nodes, strict=True)
        if state.free_slots(leader.target) >= 2 + (len(members) > 1)
    ]
    if len(with_slots) * CHAIN_CHUNK_RATIO > chunk_count:
        with_slots.sort(key=locality_key)
        two_trees(state, with_slots, (), eligible)
        return with_slots
    able_to_serve = [[each for each in members if state.free_slots(each.target)] for members in nodes]
    # First one target of each node, then a second of each.
    interleaved = [each for round_index in zip_longest(*able_to_serve) for each in round_index if each is not None]
    chosen = sorted(
        (interleaved or readers)[: max(1, chunk_count // CHAIN_CHUNK_RATIO) if interleaved else 1],
        key=locality_key,
    )
    _ring(state, chosen, eligible)
    return chosen


def _ring(state: PlanState, readers: Sequence[ForkDemand], eligible: Mapping[str, Storage]) -> None:
    """Let each target read its part from storage and everything else from its predecessor."""
    all_chunks: tuple[Range, ...] = ((0, readers[0].target.chunk_count),)
    parts = split(all_chunks, len(readers))
    for position, part in enumerate(parts):
        demand = readers[position]
        target, before = demand.target, readers[position - 1].target
        assignments = to_assignments(target, [(before, subtract(all_chunks, part))]) if len(parts) > 1 else ()
        storage = ((eligible[demand.fork_id], part),)
        reason = reasons.choice_reason(state, target, assignments, storage)
        state.decide(
            demand,
            PlanDecision(target.weights_id, assignments, reason, provisional_id=target.provisional_id, storage=storage),
        )


def _score(demand: ForkDemand, eligible: dict[str, Storage]) -> tuple[bool, bool, int, float, int, str]:
    target = demand.target
    return (
        target.slow,
        not target.max_readers,
        STORAGE_PREFERENCE[eligible[demand.fork_id].kind],
        -(target.ingress_rate or 0.0),
        -target.max_readers,
        target.instance_id,
    )
