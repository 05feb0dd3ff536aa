"""Dry run of a scale-up: the planner's own policy over hypothetical replicas.

Without side effects: `snapshot_group` copies what the planner knows, on the event loop; `build_scenario` adds
the hypothetical replicas, and `preview` plans and predicts, on any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from planner.dry_run.flow_simulation import LinkRates, simulate_flows
from planner.dry_run.scenario import GroupSnapshot, Scenario, build_scenario, snapshot_group
from planner.policy import group_plan
from planner.policy.types import ChunkShare, ForkDemand, GroupView, PlanDecision
from rfork import schema
from rfork.image.ranges import count
from rfork.schema import Preview, PreviewTarget

__all__ = ["GroupSnapshot", "Scenario", "build_scenario", "preview", "snapshot_group"]

ROUNDS: Final = 16
"""Maximum planning rounds for targets that found every source full: a round later, others are seeds."""


def preview(scenario: Scenario) -> Preview:
    """Predict what each target reads from which source, and when it is complete.

    Targets without a slot are planned again when the others are complete, though a slot may be free before
    that. If no instance has the image, all targets can read it from storage, provided that any instance could
    before.
    """
    group, pending = scenario.group, list(scenario.demands)
    rates = LinkRates(scenario.link_rate, scenario.storage_rate)
    targets_by_id: dict[str, PreviewTarget] = {}
    begin_s, storage_bytes = 0.0, 0
    for round_index in range(ROUNDS):
        decisions, pending = _plan_round(scenario, group, pending, cold=round_index == 0)
        receiving = [each for each in pending if _reads(decisions[each.fork_id])]
        group = _apply_decisions(group, receiving, decisions)
        fork_seconds = simulate_flows(group.sources, group.shares, scenario.image_bytes, rates)
        for demand in pending:
            decision = decisions[demand.fork_id]
            duration_s = fork_seconds.get(demand.fork_id) if _reads(decision) else None
            targets_by_id[demand.fork_id] = _preview_target(
                group, demand, decision, None if duration_s is None else begin_s + duration_s
            )
            chunks = sum(count(ranges) for _, ranges in decision.storage)
            storage_bytes += scenario.image_bytes * chunks // max(1, demand.target.chunk_count)
        pending = [each for each in pending if not _reads(decisions[each.fork_id])]
        may_retry = any(decisions[each.fork_id].no_free_slot for each in pending)
        if not (receiving and may_retry):
            break
        begin_s += max(fork_seconds.values(), default=0.0)
        group = _complete_targets(group, receiving, fork_seconds)
    targets = tuple(targets_by_id[demand.fork_id] for demand in scenario.demands)
    first = scenario.demands[0].target
    return Preview(
        model=scenario.group.model,
        version=scenario.group.version or None,
        rank_key=scenario.group.rank_key,
        image_bytes=scenario.image_bytes,
        chunk_count=first.chunk_count,
        seeds=scenario.seeds,
        link_bytes_per_s=scenario.link_rate,
        measured=scenario.is_link_measured,
        storage_bytes_per_s=scenario.storage_rate,
        targets=targets,
        seconds=max((each.seconds for each in targets if each.seconds is not None), default=None),
        bound_s=scenario.image_bytes / scenario.link_rate,
        storage_bytes=storage_bytes,
    )


def _plan_round(
    scenario: Scenario, group: GroupView, demands: Sequence[ForkDemand], *, cold: bool
) -> tuple[Mapping[str, PlanDecision], list[ForkDemand]]:
    """Return the policy's decisions, and the demands that they are for.

    As in real forks, targets report their storage only if the planner knows no source.
    """
    decisions = group_plan.plan(group, demands, scenario.now)
    no_reader = not any(_reads(each) or each.no_free_slot for each in decisions.values())
    if not (cold and no_reader and scenario.storage):
        return decisions, list(demands)
    eligible = [replace(each, target=replace(each.target, storage=scenario.storage)) for each in demands]
    return group_plan.plan(group, eligible, scenario.now), eligible


def _reads(decision: PlanDecision) -> bool:
    return bool(decision.assignments or decision.storage)


def _apply_decisions(
    group: GroupView, receiving: Sequence[ForkDemand], decisions: Mapping[str, PlanDecision]
) -> GroupView:
    """Return the group after these targets have begun. Running forks count if they could be read from."""
    layout_id = receiving[0].target.layout_id if receiving else None
    sources = dict(group.sources)
    shares = {
        name: reads
        for name, reads in group.shares.items()
        if (source := sources.get(name)) is not None and source.layout_id == layout_id
    }
    for demand in receiving:
        target_id, decision = demand.target.instance_id, decisions[demand.fork_id]
        sources[target_id] = demand.target
        stored = tuple(ChunkShare(target_id, ranges, each.kind == "loader") for each, ranges in decision.storage)
        shares[target_id] = decision.shares + stored
    return replace(group, sources=sources, shares=shares)


def _complete_targets(
    group: GroupView, receiving: Sequence[ForkDemand], fork_seconds: Mapping[str, float]
) -> GroupView:
    """Return the group after these targets and the running forks are complete, without readers."""
    sources = dict(group.sources)
    weights = {source.weights_id for source in sources.values() if source.complete}
    weights_id = next(iter(sorted(each for each in weights if each)), "preview")
    complete_sources = [source for name in fork_seconds if (source := sources.get(name)) is not None]
    for source in complete_sources:
        all_chunks = ((0, source.chunk_count),)
        named = source.weights_id or weights_id
        sources[source.instance_id] = replace(source, state="serving", verified=all_chunks, weights_id=named)
    return replace(
        group, sources=sources, readers={}, same_host_readers={}, shares={}, candidates=None, content_counts=None
    )


def _preview_target(
    group: GroupView, demand: ForkDemand, decision: PlanDecision, seconds: float | None
) -> PreviewTarget:
    target = demand.target
    shares = [(each.source_id, each.chunks) for each in decision.assignments]
    shares += [(target.instance_id, ranges) for _, ranges in decision.storage]
    return PreviewTarget(
        instance_id=target.instance_id,
        host=target.location.host,
        shares=tuple(schema.ChunkAssignment(source_id=name, chunks=chunks) for name, chunks in shares),
        transports={each.source_id: each.transports[0] for each in decision.assignments if each.transports},
        seconds=seconds,
        reason=decision.reason,
    )
