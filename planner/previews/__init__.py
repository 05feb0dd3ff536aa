"""What would happen if replicas came now: the planner's own policy over replicas that do not exist.

Pure, and without an effect on anything: `snapshot` takes what the planner knows, on the event loop; `known`
makes replicas of it that do not exist, and `preview` decides and predicts, wherever there is time for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from planner import policy
from planner.fleet import Decision, Demand, Group, Share
from planner.previews.phantoms import Known, Snapshot, known, snapshot
from planner.previews.predicting import Rates, predict
from rfork import wire
from rfork.image.ranges import count
from rfork.wire import Preview, PreviewTarget

__all__ = ["Known", "Snapshot", "known", "preview", "snapshot"]

ROUNDS: Final = 16
"""How often those are planned again for whom every source was full: a round later others are seeds."""


def preview(known: Known) -> Preview:
    """Who would read what from whom, and when each would be whole.

    Those for whom no slot is left are planned again when the others are whole, though a slot may be free
    before that. Where nobody holds the image all of them can read it themselves, if anybody could before.
    """
    group, waiting = known.group, list(known.demands)
    rates = Rates(known.link, known.storage_rate)
    told: dict[str, PreviewTarget] = {}
    begin_s, storage_bytes = 0.0, 0
    for turn in range(ROUNDS):
        decisions, waiting = _decided(known, group, waiting, cold=turn == 0)
        reading = [each for each in waiting if _reads(decisions[each.fork_id])]
        group = _with(group, reading, decisions)
        took = predict(group.sources, group.shares, known.image_bytes, rates)
        for demand in waiting:
            decision = decisions[demand.fork_id]
            own_s = took.get(demand.fork_id) if _reads(decision) else None
            told[demand.fork_id] = _told(group, demand, decision, None if own_s is None else begin_s + own_s)
            chunks = sum(count(ranges) for _, ranges in decision.storage)
            storage_bytes += known.image_bytes * chunks // max(1, demand.target.chunk_count)
        waiting = [each for each in waiting if not _reads(decisions[each.fork_id])]
        again = any(decisions[each.fork_id].full for each in waiting)
        if not (reading and again):
            break
        begin_s += max(took.values(), default=0.0)
        group = _done(group, reading, took)
    targets = tuple(told[demand.fork_id] for demand in known.demands)
    first = known.demands[0].target
    return Preview(
        model=known.group.model,
        version=known.group.version or None,
        rank_key=known.group.rank_key,
        image_bytes=known.image_bytes,
        chunk_count=first.chunk_count,
        seeds=known.seeds,
        link_bytes_per_s=known.link,
        measured=known.measured,
        storage_bytes_per_s=known.storage_rate,
        targets=targets,
        seconds=max((each.seconds for each in targets if each.seconds is not None), default=None),
        bound_s=known.image_bytes / known.link,
        storage_bytes=storage_bytes,
    )


def _decided(
    known: Known, group: Group, demands: Sequence[Demand], *, cold: bool
) -> tuple[Mapping[str, Decision], list[Demand]]:
    """The policy's decisions, and the demands that they are for.

    As forks ask: what they could read by themselves they say once the planner knows of nobody to read from.
    """
    decisions = policy.plan(group, demands, known.now)
    nobody = not any(_reads(each) or each.full for each in decisions.values())
    if not (cold and nobody and known.storage):
        return decisions, list(demands)
    able = [replace(each, target=replace(each.target, storage=known.storage)) for each in demands]
    return policy.plan(group, able, known.now), able


def _reads(decision: Decision) -> bool:
    return bool(decision.assignments or decision.storage)


def _with(group: Group, reading: Sequence[Demand], decisions: Mapping[str, Decision]) -> Group:
    """The group once these have begun. Forks under way count where they could be read from."""
    layout_id = reading[0].target.layout_id if reading else None
    sources = dict(group.sources)
    shares = {
        name: reads
        for name, reads in group.shares.items()
        if (source := sources.get(name)) is not None and source.layout_id == layout_id
    }
    for demand in reading:
        own, decision = demand.target.instance_id, decisions[demand.fork_id]
        sources[own] = demand.target
        stored = tuple(Share(own, ranges, each.kind == "loader") for each, ranges in decision.storage)
        shares[own] = decision.shares + stored
    return replace(group, sources=sources, shares=shares)


def _done(group: Group, reading: Sequence[Demand], took: Mapping[str, float]) -> Group:
    """The group once these, and the forks that were under way, are whole; nobody reads from anybody."""
    sources = dict(group.sources)
    weights = {source.weights_id for source in sources.values() if source.complete}
    weights_id = next(iter(sorted(each for each in weights if each)), "preview")
    whole = [source for name in took if (source := sources.get(name)) is not None]
    for source in whole:
        held = ((0, source.chunk_count),)
        named = source.weights_id or weights_id
        sources[source.instance_id] = replace(source, state="serving", verified=held, weights_id=named)
    return replace(group, sources=sources, readers={}, local={}, shares={}, candidates=None, holders=None)


def _told(group: Group, demand: Demand, decision: Decision, seconds: float | None) -> PreviewTarget:
    target = demand.target
    shares = [(each.source_id, each.chunks) for each in decision.assignments]
    shares += [(target.instance_id, ranges) for _, ranges in decision.storage]
    return PreviewTarget(
        instance_id=target.instance_id,
        host=target.place.host,
        shares=tuple(wire.Share(source_id=name, chunks=chunks) for name, chunks in shares),
        transports={each.source_id: each.transports[0] for each in decision.assignments if each.transports},
        seconds=seconds,
        reason=decision.reason,
    )
