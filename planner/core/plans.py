"""Plans a batch of requests: the policy's input, records of its decisions, and responses to the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from planner.core.leases import LeaseSigner
from planner.core.records import ForkRecord, InstanceRecord, RouteRecord
from planner.core.requests import PlanContext
from planner.core.state import PlannerState
from planner.policy import group_plan
from planner.policy.background import accepted_forks, reserved_slots, uses_busy_link
from planner.policy.starvation import is_starving
from planner.policy.transports import is_same_host_read, shared_transports
from planner.policy.types import ChunkShare, ForkDemand, PlanDecision, Source
from rfork.image.ranges import normalise
from rfork.schema import Lease, Plan, ProgressAck, Route, StorageAssignment

RETRY_S: Final = 0.5
"""When to retry if every source is full: soon, because a slot may become free at any time."""
PAUSE_S: Final = 1.0
"""When a paused background fork retries."""
YIELD_REASON: Final = "engines need its sources, and this fork is a prefetch"


def plan_batch(
    state: PlannerState, batch: Sequence[PlanContext], now: float
) -> tuple[tuple[ForkRecord, ...], Mapping[str, PlanDecision]]:
    """Return the records of planned forks in the order of the batch, and the policy's decisions by fork_id."""
    key = batch[0].group
    demands = [_demand(state, context, now) for context in batch]
    group = state.group(key).view(
        demands,
        state.other_ranks(key),
        other_versions=state.other_versions(key),
        receiving_hosts=state.receiving_hosts,
        sending_hosts=state.sending_hosts,
    )
    decisions = group_plan.plan(group, demands, now)
    registered = {context.instance_id: context.target for context in batch}
    forks = tuple(_fork_record(state, context, decisions[context.fork_id], registered, now) for context in batch)
    return forks, decisions


def build_plan(
    state: PlannerState,
    fork: ForkRecord,
    decision: PlanDecision,
    signer: LeaseSigner,
    unix_s: float,
    *,
    forgotten: bool = False,
) -> Plan:
    """Return a fork's plan for its target; `forgotten`: the fork began with plans that this planner does not
    know.
    """
    other = None if decision.mismatched_source is None else RouteRecord(decision.mismatched_source, (), (), 0)
    routes = [_route(state, fork.fork_id, read, signer, unix_s) for read in fork.reads]
    must_retry = decision.no_free_slot or (forgotten and not (fork.reads or fork.storage))
    return Plan(
        fork_id=fork.fork_id,
        version=fork.version or None,
        weights_id=decision.weights_id,
        provisional_id=decision.provisional_id,
        routes=tuple(route for route in routes if route is not None),
        storage=fork.storage,
        reason=fork.reason,
        retry_after_s=(PAUSE_S if decision.is_paused else RETRY_S) if must_retry or None in routes else None,
        mismatched_source=_route(state, fork.fork_id, other, signer, unix_s) if other is not None else None,
        is_paused=decision.is_paused,
        own_load_s=state.group(fork.group).history.own_load_s,
    )


def current_plan(state: PlannerState, fork: ForkRecord, signer: LeaseSigner, unix_s: float) -> Plan:
    """Return the existing plan of a running fork, with new leases."""
    decision = PlanDecision(fork.weights_id, (), fork.reason, fork.provisional_id)
    return build_plan(state, fork, decision, signer, unix_s)


def renew_leases(state: PlannerState, fork: ForkRecord, signer: LeaseSigner, unix_s: float) -> ProgressAck:
    """Return new leases for the routes of a fork, and whether a better plan is available."""
    leases: dict[str, Lease] = {}
    replan_reason = _delay_reason(state, fork)
    for read in fork.reads:
        source = state.instance(read.source_id)
        # Changed weights are fenced: readers of the old ones get no more time.
        if source is None or source.report.generation != read.generation:
            continue
        leases[read.source_id] = signer.lease(fork.fork_id, source, unix_s)
        if source.slow_since is not None and source.slow_since > fork.planned_at and not source.source.complete:
            replan_reason = f"source {read.source_id} is falling behind"
        elif _lost_sources(state, source, fork.planned_at):
            replan_reason = f"source {read.source_id} has no source of its own any more"
    return ProgressAck(leases=leases, replan_suggested=replan_reason)


def _delay_reason(state: PlannerState, fork: ForkRecord) -> str | None:
    """Return why the target should read elsewhere although its sources work; None if it should not."""
    target = state.instance(fork.instance_id)
    if target is None or not fork.reads:
        return None
    index = state.group(fork.group)
    if index.is_background(fork.fork_id):
        return YIELD_REASON if _must_yield(state, fork, target.source) else None
    if target.slow_since is not None and target.slow_since > fork.planned_at:
        return "this instance falls behind its sources, which other targets need"
    for seed in index.idle_seeds(target.source):
        host = seed.location.host
        if host in index.shared_hosts and host in state.sending_hosts:
            continue  # its link is used by another member
        can_read = seed.instance_id not in fork.faults_by_source and shared_transports(seed, target.source)
        if can_read and is_starving(index, target.source, seed):
            return f"seed {seed.instance_id} has no readers, and the current sources are slower"
    return None


def _must_yield(state: PlannerState, fork: ForkRecord, target: Source) -> bool:
    """Return True if a background fork must leave one of its sources to engines; see `planner.policy.background`."""
    index = state.group(fork.group)
    for read in fork.reads:
        record = state.instance(read.source_id)
        if record is None:
            continue
        source = record.source
        if uses_busy_link(source, target, state.receiving_hosts, state.sending_hosts):
            return True
        same_host = is_same_host_read(source, target)
        engine_waits = accepted_forks(source) == 1 and index.engine_waits
        reserved = reserved_slots(source, same_host=same_host, engine_waits=engine_waits)
        if reserved and not index.free_slots(source, same_host=same_host):
            return True
    return False


def is_after_restart(context: PlanContext, now: float, heartbeat_s: float) -> bool:
    """Return True if the fork began with plans that this planner does not know.

    Within `heartbeat_s` after a restart, every running source has reported.
    """
    old = context.previous_fork
    known = old is not None and (old.sources_used or now >= old.requested_at + heartbeat_s)
    return context.is_replan and not known


def _demand(state: PlannerState, context: PlanContext, now: float) -> ForkDemand:
    assessment, previous_fork, own_id = context.assessment, context.previous_fork, context.instance_id
    excluded = dict(assessment.excluded_once)
    for instance_id, blame in assessment.faults_by_source.items():
        accused = state.instance(instance_id)
        if instance_id == own_id or (accused and blame.is_active(now, accused.report.generation)):
            excluded.setdefault(instance_id, blame.reason)
    current: list[ChunkShare] = []
    if context.request.current_assignments:
        current = [
            ChunkShare(share.source_id, normalise(share.chunks)) for share in context.request.current_assignments
        ]
    elif previous_fork is not None and previous_fork.live:
        current = [ChunkShare(read.source_id, read.chunks) for read in previous_fork.reads]
        current += [ChunkShare(own_id, read.chunks) for read in previous_fork.storage]
    failed = {fault.instance_id for fault in context.request.faults}
    kept = tuple(share for share in current if share.source_id not in failed)
    elected = previous_fork is not None and own_id in previous_fork.sources_used
    return ForkDemand(context.fork_id, context.target.source, excluded, kept, elected)


def _fork_record(
    state: PlannerState,
    context: PlanContext,
    decision: PlanDecision,
    registered: Mapping[str, InstanceRecord],
    now: float,
) -> ForkRecord:
    report, old = context.target.report, context.previous_fork
    sources = [each.source_id for each in decision.assignments]
    sources += [report.instance_id] if decision.storage else []
    return ForkRecord(
        fork_id=context.fork_id,
        instance_id=report.instance_id,
        model=report.model,
        rank=report.rank,
        version=context.target.version,
        chunk_count=report.chunk_count,
        image_bytes=report.image_bytes,
        requested_at=old.requested_at if old else now,
        planned_at=now,
        seen_at=now,
        reads=tuple(
            RouteRecord(each.source_id, each.chunks, each.transports, source.report.generation)
            for each in decision.assignments
            if (source := registered.get(each.source_id) or state.instance(each.source_id))
        ),
        storage=tuple(
            StorageAssignment(kind=storage.kind, uri=storage.uri, chunks=chunks) for storage, chunks in decision.storage
        ),
        weights_id=decision.weights_id,
        provisional_id=decision.provisional_id,
        reason="; ".join(filter(None, (context.version_note, decision.reason))),
        progress=old.progress if old else None,
        faults_by_source=context.assessment.faults_by_source,
        sources_used=(old.sources_used if old else frozenset()).union(sources),
        owner=context.target.owner,
        holder=report.holder,
    )


def _lost_sources(state: PlannerState, source: InstanceRecord, since: float) -> bool:
    """Return True if a relay has no source any more: its readers may be able to read storage instead."""
    if source.source.complete:
        return False
    fork = state.live_fork_of(source.report.instance_id)
    return fork is not None and fork.planned_at > since and not (fork.reads or fork.storage)


def _route(state: PlannerState, fork_id: str, read: RouteRecord, signer: LeaseSigner, unix_s: float) -> Route | None:
    source = state.instance(read.source_id)
    if source is None:
        return None  # forgotten while the plan was stored: the target requests its chunks again
    return Route(
        source_id=read.source_id,
        address=source.report.address,
        placement=source.report.placement,
        transports=read.transports,
        generation=source.report.generation,
        chunks=read.chunks,
        lease=signer.lease(fork_id, source, unix_s),
    )
