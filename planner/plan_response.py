"""Responses to targets: plans and leases, built from decisions and the sources' records."""

from __future__ import annotations

from typing import Final

from planner.leases import LeaseSigner
from planner.policy_types import PlanDecision
from planner.store.base import PlannerStore
from planner.store.records import ForkRecord, InstanceRecord, RouteRecord
from rfork.schema import Lease, Plan, ProgressAck, Route

RETRY_S: Final = 0.5
"""When to retry if every source is full: soon, because a slot may become free at any time."""


class PlanResponseBuilder:
    """Converts decisions and records into wire models."""

    def __init__(self, store: PlannerStore, lease_signer: LeaseSigner) -> None:
        self._store = store
        self._lease_signer = lease_signer

    def plan(self, fork: ForkRecord, decision: PlanDecision, *, forgotten: bool) -> Plan:
        """Return a fork's plan for its target; `forgotten`: the fork began with plans that this planner does
        not know.
        """
        other = None if decision.mismatched_source is None else RouteRecord(decision.mismatched_source, (), (), 0)
        routes = [self._route(fork.fork_id, read) for read in fork.reads]
        replan_reason = decision.no_free_slot or (forgotten and not (fork.reads or fork.storage))
        return Plan(
            fork_id=fork.fork_id,
            version=fork.version or None,
            weights_id=decision.weights_id,
            provisional_id=decision.provisional_id,
            routes=tuple(route for route in routes if route is not None),
            storage=fork.storage,
            reason=fork.reason,
            retry_after_s=RETRY_S if replan_reason or None in routes else None,
            mismatched_source=self._route(fork.fork_id, other) if other is not None else None,
        )

    def current_plan(self, fork: ForkRecord) -> Plan:
        """Return the existing plan of a running fork, with new leases."""
        return self.plan(fork, PlanDecision(fork.weights_id, (), fork.reason, fork.provisional_id), forgotten=False)

    def renew_leases(self, fork: ForkRecord) -> ProgressAck:
        """Return new leases for the routes of a fork, and whether a better plan is available."""
        leases: dict[str, Lease] = {}
        replan_reason: str | None = None
        for read in fork.reads:
            source = self._store.state.instance(read.source_id)
            # Changed weights are fenced: readers of the old ones get no more time.
            if source is None or source.report.generation != read.generation:
                continue
            leases[read.source_id] = self._lease(fork.fork_id, source)
            if source.slow_since is not None and source.slow_since > fork.planned_at and not source.source.complete:
                replan_reason = f"source {read.source_id} is falling behind"
            elif self._lost_sources(source, fork.planned_at):
                replan_reason = f"source {read.source_id} has no source of its own any more"
        return ProgressAck(leases=leases, replan_suggested=replan_reason)

    def _lost_sources(self, source: InstanceRecord, since: float) -> bool:
        """Return True if a relay has no source any more: its readers may be able to read storage instead."""
        if source.source.complete:
            return False
        fork = self._store.state.live_fork_of(source.report.instance_id)
        return fork is not None and fork.planned_at > since and not (fork.reads or fork.storage)

    def _route(self, fork_id: str, read: RouteRecord) -> Route | None:
        source = self._store.state.instance(read.source_id)
        if source is None:
            return None  # forgotten while the plan was stored: the target requests its chunks again
        return Route(
            source_id=read.source_id,
            address=source.report.address,
            placement=source.report.placement,
            transports=read.transports,
            generation=source.report.generation,
            chunks=read.chunks,
            lease=self._lease(fork_id, source),
        )

    def _lease(self, fork_id: str, source: InstanceRecord) -> Lease:
        report = source.report
        return self._lease_signer.lease(
            fork_id=fork_id, source_id=report.instance_id, layout_id=report.layout_id,
            weights_id=report.weights_id, generation=report.generation, owner=source.owner,
        )  # fmt: skip
