"""Planning of one group: decides which target reads which chunks from which source. Pure.

The service, the simulator and the tests call the same `plan`. It has no clock, no randomness and no memory:
the same group, demands and time yield the same decisions.

`attach` plans one target (`eligibility` decides which sources can be read from, `source_selection` how the
chunks are divided), `fanout` many that arrived together, in the shapes of `trees`; `cold_start` elects
storage readers if no instance has the image; `stragglers` finds relays that no target should wait for, and
`starvation` targets that a seed without readers could serve faster;
`plan_state` is the working state of one call, and `transports`, `weights` and `chunk_split` are helpers for
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.policy import reasons
from planner.policy.attach import attach, leaves_busy_source
from planner.policy.cold_start import elect_storage_readers
from planner.policy.eligibility import YIELDS, ineligible_reason
from planner.policy.fanout import plan_fanout
from planner.policy.plan_state import PlanState
from planner.policy.stragglers import SlowReports, stragglers
from planner.policy.transports import has_only_same_host
from planner.policy.types import ContentCount, ForkDemand, GroupView, PlanDecision, Source
from planner.policy.weights import weights_compatible, with_requested_weights
from rfork.image.ranges import subtract

__all__ = ["SlowReports", "plan", "stragglers"]

PlanningKey = tuple[str, int, tuple[str, ...], str | None, bool]
"""Targets with equal layout, chunk count and transports can be planned together; if none of the transports
reaches another host, only those of one host. Background forks are planned separately.
"""


def plan(group: GroupView, demands: Sequence[ForkDemand], now: float) -> dict[str, PlanDecision]:
    """Return a decision for each demand, by fork_id. Demands planned in one call share one plan.

    Every missing chunk is assigned to at most one source: an eligible peer that will have it, or the target's
    own storage. A decision without either has a reason.
    """
    if len(demands) > 1:
        demands = sorted(demands, key=lambda demand: demand.fork_id)
    state = PlanState(group, demands, now)
    if len(demands) > 1:
        demands = sorted(demands, key=lambda demand: _planning_order(state, demand))
        for demand in [each for each in demands if leaves_busy_source(state, each)]:
            state.release(demand)  # no other target counts on what it would have received
    demands_by_key: dict[PlanningKey, list[ForkDemand]] = {}
    for demand in demands:
        target = demand.target
        if target.chunk_count and subtract([(0, target.chunk_count)], target.verified):
            host = target.location.host if has_only_same_host(target.transports) else None
            is_background = state.is_background(target)
            planning_key = (target.layout_id, target.chunk_count, target.transports, host, is_background)
            demands_by_key.setdefault(planning_key, []).append(demand)
        else:
            done = PlanDecision(
                target.weights_id, (), "every chunk is already verified", provisional_id=target.provisional_id
            )
            state.decide(demand, done)
    for same_layout in demands_by_key.values():
        _plan_same_layout(state, same_layout)
    if len(demands) > 1 and state.planned():
        for demand in state.unplanned():
            # It was planned before the targets that it depends on.
            if demand.target.watermark < demand.target.chunk_count:
                state.release(demand)
                _plan_single(state, demand)
    for demand in demands:
        if state.decisions[demand.fork_id].storage:
            _name_another_layout(state, demand)
    return state.decisions


def _plan_same_layout(state: PlanState, demands: list[ForkDemand]) -> None:
    """Plan demands of one layout and the same transports."""
    first, content_counts = demands[0].target, state.group.content_counts
    own = first.instance_id if len(demands) == 1 else None
    sources, others = _candidates(state, first, own)
    best = _preferred_weights(content_counts if content_counts is not None else count_contents(sources, state.now))
    if len(demands) == 1:
        _plan_among(state, _with_preferred_weights(demands[0], best), sources, others)
        return
    # Targets of the batch that share a host are left to the fan-out.
    source_locations = [source.location for source in sources if not state.is_unplanned(source.instance_id)]
    nodes = {location.host for location in source_locations} | {
        location.nvlink for location in source_locations if location.nvlink
    }
    with_chunks: list[ForkDemand] = []
    without_chunks: list[ForkDemand] = []
    for demand in demands:
        target = demand.target
        co_located = target.location.host in nodes or target.location.nvlink in nodes
        planned_singly = _has_begun(target) or demand.current_shares or demand.excluded or co_located
        (with_chunks if planned_singly else without_chunks).append(_with_preferred_weights(demand, best))
    for demand in with_chunks:
        _plan_single(state, demand)
    state.plans_background = state.is_background(first)
    if len(without_chunks) > 1:
        sources, _ = _candidates(state, first, None)
        without_chunks = plan_fanout(
            state,
            without_chunks,
            [source for source in sources if weights_compatible(source, without_chunks[0].target)],
        )
    if (
        len(without_chunks) > 1
        and first.transports
        and not state.leaves_storage(first)
        and not any(source.verified or state.shares(source.instance_id) for source in sources)
    ):
        without_chunks = elect_storage_readers(state, without_chunks)
    for demand in without_chunks:
        _plan_single(state, demand)


def _planning_order(state: PlanState, demand: ForkDemand) -> tuple[bool, bool, bool, int, int, str]:
    """Sort engines first, then storage readers, then targets by progress: others may wait for them.

    Of the targets that lost a source, those nearest to the seed choose first. Slow ones come last: the first of them
    stays where it delays few, and the others read from one another.
    """
    own = demand.target.instance_id
    leaves = leaves_busy_source(state, demand)
    depth = _depth(state, demand, leaves)
    return (
        demand.target.background,
        all(share.source_id != own for share in demand.current_shares),
        demand.target.slow,
        -depth if leaves else depth,
        -demand.target.watermark,
        demand.fork_id,
    )


def _depth(state: PlanState, demand: ForkDemand, leaves: bool) -> int:
    """Return the minimum number of links through which the target received what it lost; 0 if it lost nothing.

    `leaves`: it leaves all of its sources.
    """
    lost = [
        share.chunks[-1][1] - 1
        for share in demand.current_shares
        if share.chunks and (leaves or (source := state.source(share.source_id)) is None or source.is_slow_relay)
    ]
    return min((state.links(demand.target, chunk) for chunk in lost), default=0)


def _candidates(state: PlanState, target: Source, own: str | None) -> tuple[list[Source], list[Source]]:
    """Return the candidates and the targets planned in this call, except `own`: those with the target's layout, and
    the others.
    """
    group = state.group
    named = group.sources if group.candidates is None else group.candidates
    same_layout: list[Source] = []
    others: list[Source] = []
    planned = state.planned()
    for name in dict.fromkeys((*named, *planned)) if planned else named:
        if name == own or (source := state.source(name)) is None:
            continue
        is_same = source.layout_id == target.layout_id and source.chunk_count == target.chunk_count
        (same_layout if is_same else others).append(source)
    return same_layout, others


def _has_begun(target: Source) -> bool:
    """Return True if the target has chunks of known weights."""
    return bool(target.verified and (target.weights_id or target.provisional_id))


def _with_preferred_weights(demand: ForkDemand, preferred: tuple[str | None, str | None]) -> ForkDemand:
    """Return the demand for these weights, or for those of the chunks that its target has."""
    return demand if _has_begun(demand.target) else with_requested_weights(demand, *preferred)


def _plan_single(state: PlanState, demand: ForkDemand) -> None:
    """Plan one of several demands, after those that were planned in this call so far."""
    _plan_among(state, demand, *_candidates(state, demand.target, demand.target.instance_id))


def _plan_among(state: PlanState, demand: ForkDemand, sources: list[Source], others: list[Source]) -> None:
    """Plan one demand. `sources`: the candidates with its layout; `others`: those with another layout."""
    state.plans_background = state.is_background(demand.target)
    decision = attach(state, demand, sources)
    if (decision.storage or decision.no_free_slot or not decision.assignments) and _accepts_other_weights(
        state, demand, sources
    ):
        # Another target may be reading other files by now, for the group.
        for content in sorted({(source.weights_id or "", source.provisional_id or "") for source in sources}):
            pinned_demand = with_requested_weights(demand, content[0] or None, content[1] or None)
            other_decision = attach(state, pinned_demand, sources)
            better = (
                other_decision.assignments
                if decision.assignments
                else other_decision.assignments or other_decision.no_free_slot
            )
            if better and not other_decision.storage and not (decision.assignments and other_decision.no_free_slot):
                decision, demand = other_decision, pinned_demand
                break
    if not decision.assignments and not decision.storage:
        if not sources:
            other = reasons.sample_source(others).instance_id if others else None
            reason = reasons.no_holder_reason(state.group, others)
            decision = PlanDecision(None, (), reason, mismatched_source=other)
        elif others:
            other_layout_note = reasons.other_layouts_phrase(state.group, others, "this model and rank")
            decision = replace(decision, reason=f"{decision.reason}; {other_layout_note}")
    state.decide(demand, decision)


def _name_another_layout(state: PlanState, demand: ForkDemand) -> None:
    """Add a complete instance with another layout to a plan that reads storage, for the target to compare
    with.
    """
    sources, candidates = _candidates(state, demand.target, demand.target.instance_id)
    others = [source for source in candidates if source.complete]
    if others and not any(source.complete for source in sources):
        decision = state.decisions[demand.fork_id]
        other_layout_note = reasons.other_layouts_phrase(state.group, others, "this model and rank")
        state.decisions[demand.fork_id] = replace(
            decision,
            reason=f"{decision.reason}; {other_layout_note}",
            mismatched_source=reasons.sample_source(others).instance_id,
        )


def _accepts_other_weights(state: PlanState, demand: ForkDemand, sources: list[Source]) -> bool:
    """Return True if the target may receive other weights: it has none, and no seed serves those it requests."""
    target = demand.target
    if target.verified or any(share.source_id == target.instance_id for share in demand.current_shares):
        return False
    return not any(
        source.complete
        and source.weights_id == target.weights_id
        and ineligible_reason(state, source, demand) in ("", YIELDS)
        for source in sources
    )


def count_contents(sources: Sequence[Source], now: float) -> dict[tuple[str | None, str | None], ContentCount]:
    """Count the instances with each weights_id or provisional_id among these sources."""
    found: dict[tuple[str | None, str | None], ContentCount] = {}
    for source in sources:
        key = (source.weights_id, None) if source.weights_id else (None, source.provisional_id)
        unreadable = source.state == "draining" or now < source.quarantined_until or not source.verified
        if key == (None, None) or unreadable:
            continue  # weights that no source serves must not keep targets from those that are served
        before = found.get(key, ContentCount())
        found[key] = ContentCount(
            seeds=before.seeds + source.complete,
            instances=before.instances + 1,
            generation=max(before.generation, source.generation),
        )
    return found


def _preferred_weights(
    content_counts: Mapping[tuple[str | None, str | None], ContentCount],
) -> tuple[str | None, str | None]:
    """Return the weights with the most eligible seeds; then the most instances, then the newest generation."""
    return max(
        content_counts,
        key=lambda key: (content_counts[key], key[0] or "", key[1] or ""),
        default=(None, None),
    )
