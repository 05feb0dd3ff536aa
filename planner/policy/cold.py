"""Nobody holds the image: who of those that wait reads it from storage, and how the others get it.

With a snapshot every chunk can be told right from wrong at once, so several share the read: they form
a ring, in which each reads its part from storage and takes the rest from the one before it; of many,
the roots of the two trees read a half each. They are on as many nodes as can be; the others of a node
read from theirs. Else one target is elected: it reads its checkpoint, or
calls its loader, and the others stand behind it while it reads. Either way storage gives every byte
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Final

from planner.fleet import Decision, Demand, Storage
from planner.policy import reasons
from planner.policy.fanout import SHORT, fan_out, node_of, two_trees, where
from planner.policy.parts import assigned, split
from planner.policy.weights import readable_by_itself, wanting
from planner.policy.working import Working
from rfork.image.ranges import Range, subtract

PREFERENCE: Final = {"snapshot": 0, "checkpoint": 1, "loader": 2}


def elect(working: Working, demands: Sequence[Demand]) -> list[Demand]:
    """Decide for targets that hold nothing and whom no source serves; returns those still without a plan.

    All have the same layout and the same transports.
    """
    able = {
        demand.fork_id: storage
        for demand in demands
        if demand.target.instance_id not in demand.blamed and (storage := readable_by_itself(demand.target))
    }
    if not able:
        return list(demands)
    snapshots = Counter(storage.weights_id for storage in able.values() if storage.kind == "snapshot")
    if snapshots:
        weights_id = max(snapshots, key=lambda weights_id: (snapshots[weights_id], weights_id))
        readers = [
            wanting(demand, weights_id, None)
            for demand in demands
            if demand.fork_id in able and able[demand.fork_id].weights_id == weights_id
        ]
        readers = [demand for demand in readers if not demand.target.slow] or readers
        readers = _share(working, readers, able)
    else:
        elected = min(
            (demand for demand in demands if demand.fork_id in able), key=lambda each: _worth(each, able)
        )
        storage = able[elected.fork_id]
        weights_id, readers = (
            None,
            [wanting(elected, None, storage.origin if storage.kind == "checkpoint" else None)],
        )
        _ring(working, readers, able)
    draft = readers[0].target.draft
    planned = {demand.fork_id for demand in readers}
    rest = [wanting(demand, weights_id, draft) for demand in demands if demand.fork_id not in planned]
    left: list[Demand] = []
    far: list[Demand] = []
    for node, members in groupby(sorted(rest, key=node_of), key=node_of):
        near = [demand.target for demand in readers if node_of(demand) == node]
        if near:
            left += fan_out(working, list(members), near)
        else:
            far += members
    return left + (fan_out(working, far, [demand.target for demand in readers]) if far else [])


def _share(working: Working, readers: list[Demand], able: Mapping[str, Storage]) -> list[Demand]:
    """Have as many as can read the snapshot together; returns those that have a plan now."""
    chunk_count = readers[0].target.chunk_count
    nodes = [list(members) for _, members in groupby(sorted(readers, key=node_of), key=node_of)]
    leaders = [max(members, key=lambda demand: working.slots(demand.target)) for members in nodes]
    with_slots = [
        leader
        for leader, members in zip(leaders, nodes, strict=True)
        if working.slots(leader.target) >= 2 + (len(members) > 1)
    ]
    if len(with_slots) * SHORT > chunk_count:
        with_slots.sort(key=where)
        two_trees(working, with_slots, (), able)
        return with_slots
    able_to_give = [[each for each in members if working.slots(each.target)] for members in nodes]
    # The first of each node, then the second of each.
    in_turn = [each for turn in zip_longest(*able_to_give) for each in turn if each is not None]
    chosen = sorted((in_turn or readers)[: max(1, chunk_count // SHORT) if in_turn else 1], key=where)
    _ring(working, chosen, able)
    return chosen


def _ring(working: Working, readers: Sequence[Demand], able: Mapping[str, Storage]) -> None:
    """Each reads its part from storage and everything else from the one before it."""
    whole: tuple[Range, ...] = ((0, readers[0].target.chunk_count),)
    parts = split(whole, len(readers))
    for position, part in enumerate(parts):
        demand = readers[position]
        target, before = demand.target, readers[position - 1].target
        assignments = assigned(target, [(before, subtract(whole, part))]) if len(parts) > 1 else ()
        storage = ((able[demand.fork_id], part),)
        reason = reasons.how(working, target, assignments, storage)
        working.decide(
            demand, Decision(target.weights_id, assignments, reason, draft=target.draft, storage=storage)
        )


def _worth(demand: Demand, able: dict[str, Storage]) -> tuple[bool, bool, int, float, int, str]:
    target = demand.target
    return (
        target.slow,
        not target.max_readers,
        PREFERENCE[able[demand.fork_id].kind],
        -(target.ingress_rate or 0.0),
        -target.max_readers,
        target.instance_id,
    )
