"""Plans batches of requests: builds the policy's input and stores its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from planner.http_errors import store_busy
from planner.metrics import Metrics
from planner.plan_response import PlanResponseBuilder
from planner.policy import group_plan
from planner.policy_types import ChunkShare, ForkDemand, PlanDecision
from planner.request_intake import PlanContext, RequestIntake
from planner.store.base import CommitConflict, PlannerStore, StoreChange
from planner.store.records import ForkRecord, InstanceRecord, RouteRecord
from rfork.image.ranges import normalise
from rfork.logs import logger
from rfork.schema import Plan, StorageAssignment

ATTEMPTS: Final = 20
"""Maximum planning attempts for a batch when other replicas change the group first."""


class PlanService:
    """Converts requests into decisions and records.

    Within `heartbeat_s` after a restart, every running source has reported.
    """

    def __init__(
        self,
        store: PlannerStore,
        request_intake: RequestIntake,
        response_builder: PlanResponseBuilder,
        metrics: Metrics,
        heartbeat_s: float,
    ) -> None:
        self._store = store
        self._request_intake = request_intake
        self._response_builder = response_builder
        self._metrics = metrics
        self._heartbeat_s = heartbeat_s
        self._log = logger("planner.plan_service")

    async def plan(self, batch: Sequence[PlanContext]) -> dict[str, Plan]:
        """Plan requests of one group together. Return plans by fork_id, without those whose instance was
        removed or whose fork ended meanwhile.

        A fork that another replica planned meanwhile keeps that plan. Raises ProblemError if other replicas
        change the group first at each attempt.
        """
        key, plans = batch[0].group, dict[str, Plan]()
        for _ in range(ATTEMPTS):
            now = self._store.now()
            version = self._store.version(key)
            for context in batch:
                if (fork := self._request_intake.existing_plan(context)) is not None:
                    plans[fork.fork_id] = self._response_builder.current_plan(fork)
            unplanned = [context for context in batch if context.fork_id not in plans]
            batch = [
                refreshed for context in unplanned if (refreshed := self._request_intake.refresh(context)) is not None
            ]
            if not batch:
                return plans
            with self._metrics.plan_seconds.time():
                demands = [self._demand(context, now) for context in batch]
                state = self._store.state
                group = state.group(key).view(demands, state.other_ranks(key), other_versions=state.other_versions(key))
                decisions = group_plan.plan(group, demands, now)
            registered = {context.target.report.instance_id: context.target for context in batch}
            forks = tuple(self._record(context, decisions[context.fork_id], registered, now) for context in batch)
            change = StoreChange(
                instances=tuple(context.target for context in batch), forks=forks, group=key, version=version
            )
            try:
                await self._store.commit(change)
            except CommitConflict:
                self._metrics.store_conflict()
                continue
            self._metrics.planned(len(batch))
            for context, fork in zip(batch, forks, strict=True):
                if not context.known:
                    self._request_intake.log_new(context.request.instance)
                previous_sources = (
                    {read.source_id for read in context.previous_fork.reads} if context.previous_fork else set()
                )
                for read in fork.reads:
                    if read.source_id not in previous_sources:
                        self._metrics.route_planned(read.transports)
                # A fork that goes well is logged when it finishes.
                is_noteworthy = context.previous_fork is not None or not (fork.reads or fork.storage)
                (self._log.info if is_noteworthy else self._log.debug)(
                    "fork planned", fork_id=fork.fork_id, instance_id=fork.instance_id, model=fork.model,
                    version=fork.version, rank=fork.rank.key, replanned=context.previous_fork is not None,
                    batch_size=len(batch), sources=[read.source_id for read in fork.reads], reason=fork.reason,
                )  # fmt: skip
            return plans | {
                fork.fork_id: self._response_builder.plan(
                    fork, decisions[fork.fork_id], forgotten=self._is_after_restart(context, now)
                )
                for context, fork in zip(batch, forks, strict=True)
            }
        raise store_busy()

    def _demand(self, context: PlanContext, now: float) -> ForkDemand:
        state, assessment = self._store.state, context.assessment
        own_id = context.target.report.instance_id
        excluded = dict(assessment.excluded_once)
        for instance_id, blame in assessment.faults_by_source.items():
            accused = state.instance(instance_id)
            if instance_id == own_id or (accused and blame.is_active(now, accused.report.generation)):
                excluded.setdefault(instance_id, blame.reason)
        if context.request.current_assignments:
            current = [
                ChunkShare(share.source_id, normalise(share.chunks)) for share in context.request.current_assignments
            ]
        elif context.previous_fork is not None and context.previous_fork.live:
            current = [ChunkShare(read.source_id, read.chunks) for read in context.previous_fork.reads]
            current += [ChunkShare(own_id, read.chunks) for read in context.previous_fork.storage]
        else:
            current = []
        failed = {fault.instance_id for fault in context.request.faults}
        current = [share for share in current if share.source_id not in failed]
        elected = context.previous_fork is not None and own_id in context.previous_fork.sources_used
        return ForkDemand(context.fork_id, context.target.source, excluded, tuple(current), elected)

    def _record(
        self,
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
                if (source := registered.get(each.source_id) or self._store.state.instance(each.source_id))
            ),
            storage=tuple(
                StorageAssignment(kind=storage.kind, uri=storage.uri, chunks=chunks)
                for storage, chunks in decision.storage
            ),
            weights_id=decision.weights_id,
            provisional_id=decision.provisional_id,
            reason="; ".join(filter(None, (context.version_note, decision.reason))),
            progress=old.progress if old else None,
            faults_by_source=context.assessment.faults_by_source,
            sources_used=(old.sources_used if old else frozenset()).union(sources),
            owner=context.target.owner,
        )

    def _is_after_restart(self, context: PlanContext, now: float) -> bool:
        """Return True if the fork began with plans that this planner does not know: its sources will report
        soon.
        """
        old = context.previous_fork
        known = old is not None and (old.sources_used or now >= old.requested_at + self._heartbeat_s)
        return context.is_replan and not known
