"""Who reads which chunks from whom: a pure function over frozen values.

The service, the simulator and the tests call the same `plan`. It reads no clock, draws no lots and
keeps nothing: the same group, demands and time give the same decisions.

What goes where: `attach` plans one target (`fitness` says who can be read from, `choosing` who gives which
part), `fanout` many that came together, by the shapes in `trees`; `cold` elects who reads storage where
nobody holds the image; `stragglers` finds those that nobody should wait for; `working` is the scratch paper
of one call, and `ways`, `weights` and `parts` are what all of them ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.fleet import Decision, Demand, Group, Holders, Source
from planner.policy import reasons
from planner.policy.attach import attach
from planner.policy.cold import elect
from planner.policy.fanout import fan_out
from planner.policy.fitness import unfit
from planner.policy.stragglers import stragglers
from planner.policy.ways import only_one_host
from planner.policy.weights import same_weights, wanting
from planner.policy.working import Working
from rfork.image.ranges import subtract

__all__ = ["plan", "stragglers"]

Kind = tuple[str, int, tuple[str, ...], str | None]
"""Targets of one layout, chunk count and list of transports can be planned together; where none of these
leads to another host, those of one host."""


def plan(group: Group, demands: Sequence[Demand], now: float) -> dict[str, Decision]:
    """A decision for each demand, by fork_id. Demands planned in one call share one plan.

    Every missing chunk is assigned to one source at most: a peer that is fit and gets it, or the
    target's own storage. A decision without either says why. Those that hold chunks already come
    first: others may wait for them.
    """
    demands = sorted(demands, key=_turn)
    working = Working(group, demands, now)
    kinds: dict[Kind, list[Demand]] = {}
    for demand in demands:
        target = demand.target
        if target.chunk_count and subtract([(0, target.chunk_count)], target.verified):
            host = target.place.host if only_one_host(target.transports) else None
            kind = (target.layout_id, target.chunk_count, target.transports, host)
            kinds.setdefault(kind, []).append(demand)
        else:
            done = Decision(target.weights_id, (), "every chunk is verified already", draft=target.draft)
            working.decide(demand, done)
    for alike in kinds.values():
        _plan_alike(working, alike)
    if len(demands) > 1 and working.planned():
        for demand in working.unserved():
            # Its turn came before that of those that it depends on.
            if demand.target.watermark < demand.target.chunk_count:
                working.release(demand)
                _attach(working, demand)
    for demand in demands:
        if working.decisions[demand.fork_id].storage:
            _name_another_layout(working, demand)
    return working.decisions


def _plan_alike(working: Working, demands: list[Demand]) -> None:
    """Plan demands of one layout and the same transports."""
    first, held = demands[0].target, working.group.holders
    own = first.instance_id if len(demands) == 1 else None
    sources = [source for source in _alive(working, own) if _alike(source, first)]
    best = _best_weights(held if held is not None else holders(sources, working.now))
    # Those of the batch itself that share a host are for the fan-out to see.
    settled = [source.place for source in sources if not working.unplanned(source.instance_id)]
    nodes = {place.host for place in settled} | {place.nvlink for place in settled if place.nvlink}
    late: list[Demand] = []
    fresh: list[Demand] = []
    for demand in demands:
        target = demand.target
        begun = target.verified and (target.weights_id or target.draft)
        wanted = wanting(demand, target.weights_id, target.draft) if begun else wanting(demand, *best)
        near = target.place.host in nodes or target.place.nvlink in nodes
        (late if begun or demand.current or demand.blamed or near else fresh).append(wanted)
    for demand in late:
        _attach(working, demand)
    if len(fresh) > 1:
        sources = [source for source in _alive(working, own) if _alike(source, first)]
        fresh = fan_out(
            working, fresh, [source for source in sources if same_weights(source, fresh[0].target)]
        )
    if (
        len(fresh) > 1
        and first.transports
        and not any(source.verified or working.shares(source.instance_id) for source in sources)
    ):
        fresh = elect(working, fresh)
    for demand in fresh:
        _attach(working, demand)


def _turn(demand: Demand) -> tuple[bool, int, str]:
    """Who reads storage comes first, then who holds most: others may wait for them."""
    own = demand.target.instance_id
    return all(share.source_id != own for share in demand.current), -demand.target.watermark, demand.fork_id


def _alive(working: Working, own: str | None) -> list[Source]:
    """Everybody but its `own` to look at: the candidates, and who has got a plan in this call."""
    group = working.group
    named = group.sources if group.candidates is None else group.candidates
    names = dict.fromkeys((*named, *working.planned()))
    return [source for name in names if name != own and (source := working.source(name)) is not None]


def _alike(source: Source, target: Source) -> bool:
    return (source.layout_id, source.chunk_count) == (target.layout_id, target.chunk_count)


def _attach(working: Working, demand: Demand) -> None:
    alive = _alive(working, demand.target.instance_id)
    sources = [source for source in alive if _alike(source, demand.target)]
    decision = attach(working, demand, sources)
    if (decision.storage or decision.full or not decision.assignments) and _open(working, demand, sources):
        # Somebody may be reading other files by now, for all that come.
        for content in sorted({(source.weights_id or "", source.draft or "") for source in sources}):
            wanted = wanting(demand, content[0] or None, content[1] or None)
            behind = attach(working, wanted, sources)
            better = behind.assignments if decision.assignments else behind.assignments or behind.full
            if better and not behind.storage and not (decision.assignments and behind.full):
                decision, demand = behind, wanted
                break
    if not decision.assignments and not decision.storage:
        others = [source for source in alive if not _alike(source, demand.target)]
        if not sources:
            other = reasons.representative(others).instance_id if others else None
            reason = reasons.nobody(working.group, others)
            decision = Decision(None, (), reason, other_layout=other)
        elif others:
            also = reasons.other_layouts(working.group, others, "this model and rank")
            decision = replace(decision, reason=f"{decision.reason}; {also}")
    working.decide(demand, decision)


def _name_another_layout(working: Working, demand: Demand) -> None:
    """Storage is read though the model is held: with another layout, which its builder should know."""
    alive = _alive(working, demand.target.instance_id)
    others = [source for source in alive if not _alike(source, demand.target) and source.complete]
    if others and not any(source.complete for source in alive if source not in others):
        decision = working.decisions[demand.fork_id]
        also = reasons.other_layouts(working.group, others, "this model and rank")
        working.decisions[demand.fork_id] = replace(
            decision,
            reason=f"{decision.reason}; {also}",
            other_layout=reasons.representative(others).instance_id,
        )


def _open(working: Working, demand: Demand, sources: list[Source]) -> bool:
    """Whether the target may still take other weights: it has none, and no seed gives those it wants."""
    target = demand.target
    if target.verified or any(share.source_id == target.instance_id for share in demand.current):
        return False
    return not any(
        source.complete and source.weights_id == target.weights_id and not unfit(source, demand, working.now)
        for source in sources
    )


def holders(sources: Sequence[Source], now: float) -> dict[tuple[str | None, str | None], Holders]:
    """Who holds which weights (and drafts) among these sources."""
    found: dict[tuple[str | None, str | None], Holders] = {}
    for source in sources:
        key = (source.weights_id, None) if source.weights_id else (None, source.draft)
        idle = source.state == "draining" or now < source.quarantined_until or not source.verified
        if key == (None, None) or idle:
            continue  # weights that nobody gives must not keep targets from those that somebody does
        before = found.get(key, Holders())
        found[key] = Holders(
            seeds=before.seeds + source.complete,
            instances=before.instances + 1,
            generation=max(before.generation, source.generation),
        )
    return found


def _best_weights(
    held: Mapping[tuple[str | None, str | None], Holders],
) -> tuple[str | None, str | None]:
    """The weights that most fit seeds hold; then most instances, then the newest generation."""
    return max(
        held,
        key=lambda key: (held[key], key[0] or "", key[1] or ""),
        default=(None, None),
    )
