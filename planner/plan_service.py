"""Service behind the API: registers instances, plans forks and tracks them until they finish.

Call from the event loop's thread only. `planner.core` decides, from the store's state; a decision takes
effect once the store has accepted it; see `planner.store.base` for concurrent changes by two replicas.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from planner.clock import Clock
from planner.core import plans, requests
from planner.core.batch_queue import Batch, BatchQueue
from planner.core.faults import QUARANTINE_S, AvoidedByHost, FaultAssessment, contradictions
from planner.core.holders import (
    PrefetchResult,
    is_worth_storing,
    prefetch_results,
    prefetched_images,
    unused_prefetches,
)
from planner.core.leases import LeaseSigner
from planner.core.problems import ProblemError, check_ranges, store_busy
from planner.core.records import (
    ForkRecord,
    GroupKey,
    HolderRecord,
    InstanceRecord,
    ScaleUpRecord,
    StoreChange,
    Witness,
    build_fork_result,
)
from planner.core.requests import PlanContext
from planner.core.scaleups import ExpectedReplicas, scaleup_info
from planner.core.versions import ReplicaConflict, VersionResolution
from planner.metrics import Metrics
from planner.ownership import PLANNER, Claimant
from planner.policy import group_plan
from planner.policy.transports import is_same_host_route
from planner.store.base import CommitConflict, PlannerStore, StoreUnavailable
from rfork.logs import logger
from rfork.schema import (
    ExitCheck,
    ForkProgress,
    ForkRequest,
    ForkResult,
    HolderAck,
    HolderInfo,
    HolderReport,
    InstanceAck,
    InstanceReport,
    Outcome,
    Plan,
    ProgressAck,
    ScaleUp,
    ScaleUpInfo,
    WantedImage,
)
from rfork.settings import PlannerSettings
from rfork.tracing import NOOP_TRACER, Tracer
from rfork.weights_version import is_single, short

ATTEMPTS: Final = 20
"""Maximum attempts to change a group when other replicas of the planner change it first."""
MAX_SCALEUPS: Final = 10_000
"""Maximum number of scale-ups; beyond it, the one that expires first is dropped."""
SWEEP_INTERVAL_S: Final = 0.5
"""Also the interval of the first progress reports of a fork: slow links are to be found soon."""
MAX_SWEEP_SHARE: Final = 0.1
"""Maximum share of the time in which slow links are searched: with 10,000 running forks, that takes 0.2 s."""
FIRST_HEARTBEAT_FRACTION: Final = 0.9
"""Fraction of the heartbeat interval after which every instance has reported: they send at 0.8 of it."""
RATE_WINDOW_S: Final = 1.0
"""Seconds over which a target measures its current read rate (see `ForkProgress.bytes_per_s`)."""
HOLDER_HEARTBEAT_S: Final = 1.0
"""Minimum interval of holders' reports: a prefetch that begins later saves less of an engine's start."""
MAX_HOLDER_REPORTS_PER_S: Final = 200
"""Number of holders' reports that the interval is chosen for: each takes about 0.4 ms, with eight ranks on a host."""
MIN_FORKS_FOR_STRAGGLERS: Final = 3
"""Minimum number of running forks in a group before one of them can be judged slow."""

Plans = dict[str, Plan | Exception]
"""Plans by fork_id, or the errors for their callers. A fork that ended meanwhile has neither."""


class PlanService:
    """All operations of the planner. Fork requests wait in a `BatchQueue`, with one timer for its next batch."""

    def __init__(
        self,
        settings: PlannerSettings,
        store: PlannerStore,
        clock: Clock,
        metrics: Metrics,
        tracer: Tracer = NOOP_TRACER,
    ) -> None:
        self.store = store
        self.state = store.state
        """All records known to this replica."""
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._tracer = tracer
        secrets = [key.get_secret_value().encode() for key in settings.lease_keys]
        # Leases from before a restart are rejected if the settings name no key.
        self._signer = LeaseSigner(secrets or [os.urandom(32)], ttl_s=settings.lease_ttl_s)
        self._avoided_by_host = AvoidedByHost()
        self._queue = BatchQueue(store.state, settings.batch_window_s, settings.scaleup_wait_s)
        self._plans: dict[Batch, asyncio.Future[Plans]] = {}
        """Results of the batches that wait or are being planned."""
        self._planning: dict[asyncio.Task[None], Batch] = {}
        self._timer: asyncio.TimerHandle | None = None
        store.state.subscribe_scaleups(self._release_scaleups)
        self._next_sweep = 0.0
        self._slow_reports = group_plan.SlowReports()
        self._warm_at: float | None = None
        """When every running instance has reported, if the planner started without records."""
        self._log = logger("planner.plan_service")

    def now(self) -> float:
        """Return the store's time in seconds."""
        return self.store.now()

    # -- instances --------------------------------------------------------------------------------

    async def report(self, report: InstanceReport, claimant: Claimant = PLANNER) -> InstanceAck:
        """Register an instance, or process its heartbeat."""
        await self.sweep()
        old = self.state.instance(report.instance_id)
        owner = claimant.owner_of(report.instance_id, old)
        record = requests.record_report(self.state, report, owner, self.now(), self._settings)
        await self.store.commit(StoreChange(instances=(record,)))
        if old is None or old.report.state != report.state:
            self._log_new(report)
        return InstanceAck(
            heartbeat_s=self._settings.heartbeat_interval_s,
            lease_keys=self._signer.keys_of(report.instance_id, record.owner),
            unix_s=self._clock.unix(),
        )

    async def drain(self, instance_id: str, claimant: Claimant = PLANNER, *, force: bool = False) -> InstanceRecord:
        """Assign the instance no new readers, whatever it reports, until it is removed or forgotten.

        ProblemError `last-seed` (409) if no other instance has its complete weights, unless forced.
        """
        for _ in range(ATTEMPTS):
            record = replace(self.instance(instance_id), drained=True)
            claimant.check_can_remove(record)
            version = self.store.version(record.group)
            if not force and self._is_last_seed(self.instance(instance_id)):
                raise ProblemError(
                    409,
                    "last-seed",
                    f"instance {instance_id} is the last seed of {_record_name(record)}"
                    f"{self._expected_suffix(record)}: start another first, or force the drain (`rfork drain --force`)",
                )
            try:
                # If two callers drain the last two seeds concurrently, one of them must fail.
                await self.store.commit(StoreChange(instances=(record,), group=record.group, version=version))
            except CommitConflict:
                continue
            break
        else:
            raise store_busy()
        self._log.info("instance drained", instance_id=instance_id)
        return record

    async def can_exit(self, instance_id: str) -> ExitCheck:
        """Return True if the instance may exit: it has no readers and none will need it."""
        await self.sweep()
        record = self.state.instance(instance_id)
        if record is None and self._warm_at is not None and self.now() < self._warm_at:
            reason = "the planner has just started: it does not know the readers yet"
            return ExitCheck(can_exit=False, readers=0, reason=reason)
        if record is None:
            return ExitCheck(
                can_exit=True, readers=0, reason="the planner does not know this instance, so no fork reads from it"
            )
        group = self.state.group(record.group)
        readers = len(group.readers.get(instance_id, {}))
        if readers:
            return ExitCheck(can_exit=False, readers=readers, reason=f"forks that read from it: {readers}")
        # A holder's fork that waits must not delay the exit: it can fetch the image another time.
        engines = [name for name in group.shares if (target := group.sources.get(name)) is None or not target.holder]
        waiting = [name for name in engines if name != instance_id]
        if waiting and self._is_last_seed(record):
            running = "1 fork is running" if len(waiting) == 1 else f"{len(waiting)} forks are running"
            reason = f"it is the last seed of {_record_name(record)}, and {running}"
            return ExitCheck(can_exit=False, readers=0, reason=reason)
        expected_suffix = self._expected_suffix(record)
        # A drained instance gets no more readers, so there is no reason to keep it.
        if expected_suffix and record.source.state != "draining" and self._is_last_seed(record):
            reason = f"it is the last seed of {_record_name(record)}{expected_suffix}"
            return ExitCheck(can_exit=False, readers=0, reason=reason)
        if record.source.state != "draining":
            reason = "no fork reads from it; drain it first, or it may be assigned readers"
        else:
            reason = "it is drained and has no readers"
        return ExitCheck(can_exit=True, readers=0, reason=reason)

    async def remove(self, instance_id: str, claimant: Claimant = PLANNER) -> None:
        """Forget the instance and end its fork."""
        fork, record = self.state.live_fork_of(instance_id), self.state.instance(instance_id)
        known = record is not None
        if record is not None:
            claimant.check_can_remove(record)
        elif fork is not None:
            claimant.check_can_change_fork(fork)
        ended = (self._abandon(fork, "interrupted", "the instance was removed"),) if fork is not None else ()
        if known or ended:
            await self.store.commit(StoreChange(forks=ended, removed=(instance_id,) if known else ()))
            self._log.info("instance removed", instance_id=instance_id)

    def instance(self, instance_id: str) -> InstanceRecord:
        """Return the instance's record; ProblemError `unknown-instance` if there is none."""
        record = self.state.instance(instance_id)
        if record is None or self.now() >= record.expires_at:
            raise ProblemError(404, "unknown-instance", f"unknown instance {instance_id}")
        return record

    # -- forks ------------------------------------------------------------------------------------

    def fork(self, fork_id: str) -> ForkRecord:
        """Return the fork's record; ProblemError `unknown-fork` if there is none."""
        record = self.state.fork(fork_id)
        if record is None:
            raise ProblemError(404, "unknown-fork", f"unknown fork {fork_id}")
        return record

    async def plan(self, request: ForkRequest, claimant: Claimant = PLANNER) -> Plan:
        """Plan a fork, or replan it around the sources that failed it, together with those that arrive at once."""
        await self.sweep()
        if self._is_early(request.instance):
            reason = "the planner has just started: it does not know the replica's version yet"
            return Plan(fork_id=request.fork_id, reason=reason, retry_after_s=plans.RETRY_S)
        name, old = request.instance.instance_id, self.state.fork(request.fork_id)
        owner = claimant.owner_of(name, self.state.instance(name))
        if old is not None:
            claimant.check_can_change_fork(old)
        context = await self._prepare(request, owner, claimant.address)
        group = context.group
        with self._tracer.span("wait for plan", model=group.model, version=group.version, rank=group.rank_key) as span:
            traced = context if span.context is None else replace(context, trace=span.context)
            plan = await self._plan_with_others(traced)
            span.set(reason=plan.reason, routes=len(plan.routes), retry_after_s=plan.retry_after_s)
            return plan

    def _is_early(self, report: InstanceReport) -> bool:
        """Return True if the target's replica may have a version that its other ranks have not reported yet.

        That is so until every instance had time for a heartbeat, if the planner started without records.
        """
        if report.version is not None or (is_single(report.rank) and report.rank.role == "main"):
            return False
        return self._warm_at is not None and self.now() < self._warm_at

    async def _prepare(self, request: ForkRequest, owner: str, address: str) -> PlanContext:
        """Validate a request, choose its version, and assess the faults that it reports. Raises ProblemError."""
        requests.check_request(self.state, request)
        resolution = await self._settle_version(request, owner)
        state, now, heartbeat_s = self.state, self.now(), self._settings.heartbeat_interval_s
        if state.fork(request.fork_id) is None and resolution.choice in ("served", "several"):
            self._metrics.version_chosen(resolution.choice)
        for fault in request.faults:
            self._metrics.fault(fault)
        target = requests.target_record(state, request, resolution.version, owner, now, self._settings)
        witness = Witness(request.instance.instance_id, request.instance.placement.host, address)
        avoided = self._avoided_by_host.get(witness, now)
        context = requests.prepare(state, request, target, resolution.note, witness, avoided, now, heartbeat_s)
        if request.faults:
            self._avoided_by_host.set(witness, context.assessment.shared_faults)
        self._log_faults(request.fork_id, context.assessment, now)
        superseded = requests.superseded_fork(state, request, now)
        if superseded is not None:
            self._metrics.fork_abandoned()
        if context.assessment.changed_records or superseded is not None:
            # Before the plan is made, so that the slots of a missing relay are free for it.
            ended = () if superseded is None else (superseded,)
            await self.store.commit(StoreChange(instances=context.assessment.changed_records, forks=ended))
        return context

    async def _settle_version(self, request: ForkRequest, owner: str) -> VersionResolution:
        """Choose the version for the target, so that all ranks of its replica get the same one.

        A choice that depends on other instances is committed before anything is planned: if two requests
        reach two replicas of the planner, one of them must see the other's choice. Raises ProblemError.
        """
        report = request.instance
        for _ in range(ATTEMPTS):
            try:
                resolution = requests.resolve_version(self.state, request)
            except ReplicaConflict as error:
                self._metrics.version_chosen("conflict")
                raise ProblemError(409, "replica-version", str(error)) from None
            if requests.is_settled(self.state, report, resolution.version):
                return resolution
            record = requests.record_report(self.state, report, owner, self.now(), self._settings, resolution.version)
            key = GroupKey(report.model, "", "")
            change = StoreChange(instances=(record,), group=key, version=self.store.version(key))
            try:
                await self.store.commit(change)
            except CommitConflict:
                self._metrics.store_conflict()
                continue
            return resolution
        raise store_busy()

    async def _plan_with_others(self, context: PlanContext) -> Plan:
        """Return the plan of one request, made together with those that arrive within its window."""
        loop = asyncio.get_running_loop()
        batch = self._queue.add(context, loop.time(), self.now())
        if batch is None:
            return _plan_for(context, await self._plan_or_errors([context]))
        if batch not in self._plans:
            self._plans[batch] = loop.create_future()
        plans_of_batch = self._plans[batch]
        try:
            if batch.is_scaleup:
                # Published only now: the last expected replica must be part of the batch.
                await self._publish_arrival(context, batch)
        finally:  # also if the caller disconnects meanwhile: the batch needs its timer
            self._plan_due_batches()
        # Shielded: a caller that disconnects must not cancel the others' plan.
        return _plan_for(context, await asyncio.shield(plans_of_batch))

    async def _publish_arrival(self, context: PlanContext, batch: Batch) -> None:
        """Record the arrival of an expected replica, so that every replica of the planner knows immediately.

        Raises StoreUnavailable.
        """
        name = context.instance_id
        try:
            await self.store.commit(StoreChange(instances=(context.target,)))
        except StoreUnavailable:
            if batch.requests.get(name) is context:
                del batch.requests[name]
            raise
        if not context.known:
            self._log_new(context.request.instance)
        if batch.requests.get(name) is context:
            batch.requests[name] = replace(context, known=True)

    def _release_scaleups(self) -> None:
        if self._queue.awaits_scaleup:
            # After the caller has finished its change.
            asyncio.get_running_loop().call_soon(self._plan_due_batches)

    def _plan_due_batches(self, scheduled_at: float = 0.0) -> None:
        """Plan the batches that are due, in tasks, and set the timer for the next one."""
        loop, store_now = asyncio.get_running_loop(), self.now()
        now = max(loop.time(), scheduled_at)  # a timer may be slightly early
        for batch in self._queue.pop_due(now, store_now):
            if batch.is_scaleup:
                self._log_scaleup_batch(batch, now)
            task = loop.create_task(self._complete(batch))
            self._planning[task] = batch
            task.add_done_callback(self._planning.pop)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self._queue.wake_at(now, store_now)
        if wake_at < math.inf:
            self._timer = loop.call_at(wake_at, self._plan_due_batches, wake_at)

    async def _complete(self, batch: Batch) -> None:
        """Plan a batch and return the plans to its callers."""
        plans_by_fork = await self._plan_or_errors(list(batch.requests.values()))
        self._plans.pop(batch).set_result(plans_by_fork)

    async def _plan_or_errors(self, batch: Sequence[PlanContext]) -> Plans:
        """Return the plans, or errors, of requests of one group. One that cannot be planned fails alone."""
        if not batch:
            return {}
        lead, *others = [each.trace for each in batch]
        group = batch[0].group
        try:
            with self._tracer.span(
                "make plan", parent=lead, links=others, model=group.model,
                version=group.version, rank=group.rank_key, batch_size=len(batch),
                group_size=len(self.state.group(group).sources),
            ) as span:  # fmt: skip
                found = await self._plan_batch(batch)
                if self._tracer.enabled:
                    first = found.get(batch[0].fork_id)
                    span.set(
                        routes=sum(len(plan.routes) for plan in found.values()),
                        storage_readers=sum(bool(plan.storage) for plan in found.values()),
                        reason=None if first is None else first.reason,
                    )
                return dict(found)
        except (ProblemError, StoreUnavailable) as error:
            return {each.fork_id: error for each in batch}
        except Exception as error:
            if len(batch) == 1:
                return {batch[0].fork_id: error}  # raised to its caller
            self._log.exception("planning a batch failed, planning its requests separately", batch_size=len(batch))
        separate: Plans = {}
        for each in batch:
            separate |= await self._plan_or_errors([each])
        return separate

    async def _plan_batch(self, batch: Sequence[PlanContext]) -> dict[str, Plan]:
        """Plan requests of one group together. Return plans by fork_id, without those whose instance was
        removed or whose fork ended meanwhile.

        A fork that another replica planned meanwhile keeps that plan. Raises ProblemError if other replicas
        change the group first at each attempt.
        """
        key, found, state = batch[0].group, dict[str, Plan](), self.state
        for _ in range(ATTEMPTS):
            now, version = self.now(), self.store.version(key)
            for context in batch:
                if (existing := requests.existing_plan(state, context)) is not None:
                    found[existing.fork_id] = plans.current_plan(state, existing, self._signer, self._clock.unix())
            unplanned = [context for context in batch if context.fork_id not in found]
            refreshed = [requests.refresh(state, context, now, self._settings) for context in unplanned]
            batch = [context for context in refreshed if context is not None]
            if not batch:
                return found
            with self._metrics.plan_seconds.time():
                forks, decisions = plans.plan_batch(state, batch, now)
            instances = tuple(_without_rate(context.target) for context in batch)
            try:
                await self.store.commit(StoreChange(instances=instances, forks=forks, group=key, version=version))
            except CommitConflict:
                self._metrics.store_conflict()
                continue
            self._metrics.planned(len(batch))
            for context, fork in zip(batch, forks, strict=True):
                self._log_planned(context, fork, len(batch))
                forgotten = plans.is_after_restart(context, now, self._settings.heartbeat_interval_s)
                found[fork.fork_id] = plans.build_plan(
                    state, fork, decisions[fork.fork_id], self._signer, self._clock.unix(), forgotten=forgotten
                )
            return found
        raise store_busy()

    async def _stop_waiting(self, fork_id: str) -> None:
        """Remove a fork that ended while it waited for its batch; if it is being planned, wait for that."""
        for task, batch in self._planning.items():
            if any(context.fork_id == fork_id for context in batch.requests.values()):
                await asyncio.wait([task])
                return
        self._queue.remove(fork_id)

    async def progress(self, fork_id: str, progress: ForkProgress, claimant: Claimant = PLANNER) -> ProgressAck:
        """Record a fork's progress, which also counts as its instance's heartbeat, and renew its leases."""
        await self.sweep()
        fork = self.fork(fork_id)
        claimant.check_can_change_fork(fork)
        if fork.abandoned:
            raise ProblemError(404, "unknown-fork", f"fork {fork_id} was abandoned: request a new plan")
        if not fork.live:
            raise ProblemError(409, "fork-ended", f"fork {fork_id} has ended")
        check_ranges("verified", progress.verified, fork.chunk_count)
        now = self.now()
        before, rate_limits = fork, self.state.source_rate_limits(fork)
        fork = replace(fork, progress=progress, source_rate_limits=rate_limits, seen_at=now)
        target = self.state.instance(fork.instance_id)
        instances: tuple[InstanceRecord, ...] = ()
        if target is not None:
            report = target.report.model_copy(update={"verified": progress.verified})
            # A read rate within the host does not indicate the link's speed.
            same_host_read = any(is_same_host_route(read.transports) for read in fork.reads)
            # A rate of which a part is older than the plan shows nothing about the plan's sources.
            is_older_than_plan = before.progress is not None and now < fork.planned_at + RATE_WINDOW_S
            fastest = max(target.ingress_rate or 0.0, 0.0 if same_host_read else progress.bytes_per_s) or None
            witness = Witness(fork.instance_id, target.report.placement.host, claimant.address)
            heartbeat_s = self._settings.heartbeat_interval_s
            changed_accusers = contradictions(before, progress, witness, self.state, now, heartbeat_s)
            target = next((each for each in changed_accusers if each.report.instance_id == fork.instance_id), target)
            others = tuple(each for each in changed_accusers if each.report.instance_id != fork.instance_id)
            target = replace(
                target,
                report=report,
                seen_at=now,
                reported_missing=False,
                ingress_rate=fastest,
                read_rate=None if same_host_read or is_older_than_plan else progress.bytes_per_s,
                active_rate=None if same_host_read else progress.active_bytes_per_s,
                source_rates={} if same_host_read else progress.source_active_bytes_per_s,
            )
            instances = (target, *others)
        try:
            await self.store.commit(StoreChange(instances=instances, forks=(fork,)))
        except StoreUnavailable as error:
            # An unavailable store must not end running forks: their leases are renewed anyway.
            self._log.warning("progress of a fork not stored", fork_id=fork_id, reason=str(error))
        return plans.renew_leases(self.state, fork, self._signer, self._clock.unix())

    async def finish(self, fork_id: str, finish: ForkResult, claimant: Claimant = PLANNER) -> None:
        """Finish a fork; an unknown or finished fork has no lease to release."""
        fork = self.state.fork(fork_id)
        if fork is None:
            await self._stop_waiting(fork_id)
            fork = self.state.fork(fork_id)
        if fork is None or not (fork.live or fork.abandoned):
            return
        claimant.check_can_change_fork(fork)
        instances: tuple[InstanceRecord, ...] = ()
        target = self.state.instance(fork.instance_id)
        if finish.outcome == "forked" and target is not None and target.report.state == "loading":
            # A fork planned before its next report must see it as complete, or storage is read once more.
            weights_id = target.report.weights_id or fork.weights_id
            completed_progress = {"verified": ((0, fork.chunk_count),), "weights_id": weights_id}
            report = target.report.model_copy(update=completed_progress)
            instances = (replace(target, report=report),)
        ended = self._end_fork(replace(fork, abandoned=False), finish)
        holders: tuple[HolderRecord, ...] = ()
        if target is not None and target.report.holder is None:
            result, holders = self._prefetch_results(fork, finish, target.report)
            if result is not None:
                self._metrics.prefetch(result)
        await self.store.commit(StoreChange(instances=instances, forks=(ended,), holders=holders))

    def _prefetch_results(
        self, fork: ForkRecord, finish: ForkResult, target: InstanceReport
    ) -> tuple[PrefetchResult | None, tuple[HolderRecord, ...]]:
        holders = self.state.holders.on_host(target.placement.host)
        if not holders:
            return None, ()
        sources = [source for name in finish.sources if (source := self.state.instance(name)) is not None]
        local_images = [
            source
            for source in sources
            if source.report.holder is not None and source.report.placement.host == target.placement.host
        ]
        return prefetch_results(fork, finish, target.layout_id, holders, local_images)

    # -- scale-ups --------------------------------------------------------------------------------

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        """Expect replicas from now on, or a new number of them; 0 withdraws the scale-up.

        On a repeated announcement, `replicas` counts those that have not arrived yet. Raises
        StoreUnavailable.
        """
        await self.sweep()
        now, scaleups = self.now(), self.state.scaleups
        old, known = scaleups.find(scaleup.scaleup_id, now), scaleups.record(scaleup.scaleup_id)
        if old is not None:
            before = old.record.scaleup
            old = old if (before.model, before.version) == (scaleup.model, scaleup.version) else None
        record = ScaleUpRecord(
            scaleup,
            first_at=old.record.first_at if old else now,
            expires_at=now + scaleup.expires_in_s,
            before=old.max_position_count if old else 0,
        )
        if not scaleup.replicas:
            await self.withdraw(scaleup.scaleup_id)
            return scaleup_info(record, 0, now, self.state.forecast(scaleup.model, scaleup.version))
        replaced_ids: tuple[str, ...] = ()
        if known is None and len(scaleups.records()) >= MAX_SCALEUPS:
            first_to_expire = min(scaleups.records(), key=lambda each: each.expires_at)
            replaced_ids = (first_to_expire.scaleup.scaleup_id,)
            self._log.warning(
                "too many scale-ups, forgetting the one that expires first",
                scaleup_id=replaced_ids[0],
                max_scaleups=MAX_SCALEUPS,
            )
        await self.store.commit(StoreChange(scaleups=(record,), withdrawn=replaced_ids))
        if known is None or known.scaleup != scaleup:
            self._log.info(
                "scale-up announced", scaleup_id=scaleup.scaleup_id, model=scaleup.model,
                version=scaleup.version, replicas=scaleup.replicas, by=scaleup.announced_by,
                hosts=len(scaleup.hosts), expires_in_s=scaleup.expires_in_s,
            )  # fmt: skip
        tracked = self.state.scaleups.find(scaleup.scaleup_id, self.now())
        return self._scaleup_info(tracked or ExpectedReplicas(record))  # it may already have expired

    async def withdraw(self, scaleup_id: str) -> None:
        """Stop waiting for its replicas; an unknown scale-up is not an error. Raises StoreUnavailable."""
        if self.state.scaleups.record(scaleup_id) is not None:
            await self.store.commit(StoreChange(withdrawn=(scaleup_id,)))
            self._log.info("scale-up withdrawn", scaleup_id=scaleup_id)

    def scaleup(self, scaleup_id: str) -> ScaleUpInfo:
        """Return one scale-up; ProblemError `unknown-scaleup` (404) if there is none."""
        tracked = self.state.scaleups.find(scaleup_id, self.now())
        if tracked is None:
            raise ProblemError(404, "unknown-scaleup", f"unknown scale-up {scaleup_id}")
        return self._scaleup_info(tracked)

    def scaleups(self) -> list[ScaleUpInfo]:
        """Return all scale-ups in progress, ordered by id."""
        now, forecast = self.now(), cache(self.state.forecast)  # a forecast visits all instances of its model
        return [
            scaleup_info(
                tracked.record,
                tracked.arrived_since,
                now,
                forecast(tracked.record.scaleup.model, tracked.record.scaleup.version),
            )
            for tracked in self.state.scaleups.live(now)
        ]

    def _scaleup_info(self, tracked: ExpectedReplicas) -> ScaleUpInfo:
        scaleup = tracked.record.scaleup
        forecast = self.state.forecast(scaleup.model, scaleup.version)
        return scaleup_info(tracked.record, tracked.arrived_since, self.now(), forecast)

    # -- holders ----------------------------------------------------------------------------------

    async def report_holder(self, report: HolderReport, claimant: Claimant = PLANNER) -> HolderAck:
        """Register a holder, or process its heartbeat; return the images that it should keep."""
        await self.sweep()
        now, known = self.now(), self.state.holders.get(report.holder_id)
        owner = claimant.owner_of_holder(report.holder_id, known)
        wanted = self._wanted_images(report, now)
        engine_images = self.state.engine_images(report.placement.host)
        record = HolderRecord(
            report,
            seen_at=now,
            ttl_s=self._settings.instance_ttl_s,
            owner=owner,
            prefetched=prefetched_images(known, report, wanted, engine_images),
        )
        if is_worth_storing(record, known, self._settings.heartbeat_interval_s):
            await self.store.commit(StoreChange(holders=(record,)))
        if known is None:
            self._log.info(
                "holder reported", holder_id=report.holder_id, host=report.placement.host,
                memory_bytes=report.memory_bytes, images=len(report.images),
            )  # fmt: skip
        else:
            self._metrics.prefetch("unused", unused_prefetches(known, report))
        heartbeat_s = max(HOLDER_HEARTBEAT_S, self.state.holders.count / MAX_HOLDER_REPORTS_PER_S)
        return HolderAck(heartbeat_s=min(self._settings.heartbeat_interval_s, heartbeat_s), wanted=wanted)

    def holder(self, holder_id: str) -> HolderRecord:
        """Return the holder's record; ProblemError `unknown-holder` if there is none."""
        record = self.state.holders.get(holder_id)
        if record is None or self.now() >= record.expires_at:
            raise ProblemError(404, "unknown-holder", f"unknown holder {holder_id}")
        return record

    def holder_info(self, record: HolderRecord) -> HolderInfo:
        """Return a holder as listed by the API, with the images that it should keep now."""
        now = self.now()
        return record.view(now, self._wanted_images(record.report, now))

    def _wanted_images(self, report: HolderReport, now: float) -> tuple[WantedImage, ...]:
        is_warm = self._warm_at is None or now >= self._warm_at
        return self.state.wanted_images(report, now, keeps_all=not is_warm)

    async def remove_holder(self, holder_id: str, claimant: Claimant = PLANNER) -> None:
        """Forget the holder; its images are removed like other instances. An unknown holder is not an error."""
        record = self.state.holders.get(holder_id)
        if record is None:
            return
        claimant.check_can_remove_holder(record)
        await self.store.commit(StoreChange(removed_holders=(holder_id,)))
        self._metrics.prefetch("unused", unused_prefetches(record, None))
        self._log.info("holder removed", holder_id=holder_id)

    # -- periodic work -----------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Forget silent instances and holders, abandon silent forks, mark slow relays, forget expired scale-ups.

        Runs at most once in `SWEEP_INTERVAL_S`, and less often if finding slow relays takes long.
        """
        now = self.now()
        if self._warm_at is None:
            known = self.state.instance_count > 0
            self._warm_at = now if known else now + self._settings.heartbeat_interval_s * FIRST_HEARTBEAT_FRACTION
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_INTERVAL_S
        forks: dict[str, ForkRecord] = {}
        removed: list[str] = []
        for instance in self.state.overdue_instances(now):
            instance_id = instance.report.instance_id
            fork = self.state.live_fork_of(instance_id)
            if fork is not None:
                forks[fork.fork_id] = self._abandon(fork, "failed", "the instance stopped sending heartbeats")
            removed.append(instance_id)
            self._log.warning(
                "instance forgotten: it stopped sending heartbeats",
                instance_id=instance_id,
                silent_s=round(now - instance.seen_at, 1),
            )
        ttl_s = self._settings.lease_ttl_s
        for fork in self.state.overdue_forks(now - ttl_s):
            if fork.fork_id not in forks:
                forks[fork.fork_id] = self._abandon(fork, "failed", f"no progress for {ttl_s:g} s")
        began = time.perf_counter()
        slow = tuple(self._find_stragglers(now))
        self._next_sweep = now + max(SWEEP_INTERVAL_S, (time.perf_counter() - began) / MAX_SWEEP_SHARE)
        expired = self.state.scaleups.expired(now)
        holders = list(self.state.holders.overdue(now))
        if forks or removed or slow or expired or holders:
            change = StoreChange(
                instances=slow,
                forks=tuple(forks.values()),
                removed=tuple(removed),
                withdrawn=expired,
                removed_holders=tuple(record.holder_id for record in holders),
            )
            try:
                await self.store.commit(change)
            except StoreUnavailable as error:
                self._log.warning("failed to remove silent instances and forks, retrying", reason=str(error))
                return
        for record in holders:
            self._metrics.prefetch("unused", unused_prefetches(record, None))
            self._log.warning(
                "holder forgotten: it stopped sending heartbeats",
                holder_id=record.holder_id,
                silent_s=round(now - record.seen_at, 1),
            )

    def _find_stragglers(self, now: float) -> list[InstanceRecord]:
        """Return relays that have started to fall behind since the last sweep."""
        suspects: dict[str, float] = {}
        for group in self.state.groups():
            if len(group.shares) < MIN_FORKS_FOR_STRAGGLERS:
                continue
            for instance_id in group_plan.stragglers(group.view(()), now):
                fork = self.state.live_fork_of(instance_id)
                if fork is not None:
                    suspects[instance_id] = fork.seen_at
        found: list[InstanceRecord] = []
        for instance_id in self._slow_reports.confirmed(suspects):
            record = self.state.instance(instance_id)
            if record is not None and record.slow_since is None:
                found.append(replace(record, slow_since=now))
                model = record.report.model
                self._log.warning("relay falling behind", instance_id=instance_id, model=model)
        return found

    def _is_last_seed(self, record: InstanceRecord) -> bool:
        """Return True if no other readable instance has the same complete weights.

        A holder's image counts like an engine's, unless the holder ends with the start of one engine.
        """
        source, state = record.source, self.state
        if not source.complete:
            return False
        group = state.group(record.group)
        content_count = group.content_counts(source.layout_id).get((source.weights_id, None))
        others = (content_count.seeds if content_count else 0) - (source.state != "draining" and not source.quarantine)
        if others <= 0:
            return True
        seeds = group.seeds_of(source.layout_id, source.weights_id)
        records = (state.instance(name) for name in seeds if name != source.instance_id)
        return not any(other is not None and state.holders.is_lasting(other) for other in records)

    def _expected_suffix(self, record: InstanceRecord) -> str:
        """Return a message suffix about the replicas expected in its group; empty if there are none."""
        count = self.state.scaleups.expected(record.group, self.now())
        return f", and {count} replica{' is' if count == 1 else 's are'} expected" if count else ""

    def _abandon(self, fork: ForkRecord, outcome: Outcome, reason: str) -> ForkRecord:
        """End a fork on behalf of its target, which may still request a plan under the same id."""
        return self._end_fork(replace(fork, abandoned=True), build_fork_result(fork, outcome, reason, self.now()))

    def _end_fork(self, fork: ForkRecord, finish: ForkResult) -> ForkRecord:
        if fork.abandoned:
            self._metrics.fork_abandoned()
        elif fork.holder is not None:
            self._metrics.bytes_read(finish)
        else:
            self._metrics.ended(finish, self.state.group(fork.group).history.seconds_saved_by(fork, finish))
        self._log.info(
            "fork ended", fork_id=fork.fork_id, instance_id=fork.instance_id, outcome=finish.outcome,
            seconds=finish.seconds, bytes_read=finish.bytes_read, sources=finish.sources,
            reasons=finish.reasons,
        )  # fmt: skip
        return replace(fork, finish=finish, source_rate_limits=self.state.source_rate_limits(fork))

    # -- log --------------------------------------------------------------------------------------

    def _log_new(self, report: InstanceReport) -> None:
        """Log that an instance is new or changed its state."""
        self._log.info(
            "instance reported", instance_id=report.instance_id, state=report.state, model=report.model,
            version=report.version, rank=report.rank.key, address=report.address,
        )  # fmt: skip

    def _log_faults(self, fork_id: str, assessment: FaultAssessment, now: float) -> None:
        """Log and count the sources that are quarantined or accused from now on."""
        for record in assessment.changed_records:
            instance_id = record.report.instance_id
            existing = self.state.instance(instance_id)
            if now < record.quarantined_until and not (existing and now < existing.quarantined_until):
                self._metrics.quarantined()
                self._log.warning(
                    "source quarantined", instance_id=instance_id, reason=record.quarantine, fork_id=fork_id,
                    quarantine_s=QUARANTINE_S,
                )  # fmt: skip
            elif record.accusations and (existing is None or existing.accusations != record.accusations):
                self._log.warning(
                    "source reported as faulty by a reader", instance_id=instance_id,
                    reason=record.accusations[-1].reason, fork_id=fork_id,
                )  # fmt: skip

    def _log_scaleup_batch(self, batch: Batch, now: float) -> None:
        group = batch.group
        missing = self.state.scaleups.expected(group, self.now())
        self._metrics.scaleup_batched(not missing)
        self._log.info(
            "scale-up batch closed", model=group.model, version=group.version, rank=group.rank_key,
            batch_size=len(batch.requests), missing=missing, waited_s=round(now - batch.opened_at, 3),
        )  # fmt: skip

    def _log_planned(self, context: PlanContext, fork: ForkRecord, batch_size: int) -> None:
        if not context.known:
            self._log_new(context.request.instance)
        previous_sources = {read.source_id for read in context.previous_fork.reads} if context.previous_fork else set()
        for read in fork.reads:
            if read.source_id not in previous_sources:
                self._metrics.route_planned(read.transports)
        # A fork that goes well is logged when it finishes.
        is_noteworthy = context.previous_fork is not None or not (fork.reads or fork.storage)
        if (old := context.previous_fork) is not None and old.reason == fork.reason:
            is_noteworthy = bool(fork.reads or fork.storage)  # a paused prefetch requests a plan each second
        level = logging.INFO if is_noteworthy else logging.DEBUG
        if not self._log.is_enabled_for(level):
            return
        self._log.log(
            level, "fork planned", fork_id=fork.fork_id, instance_id=fork.instance_id, model=fork.model,
            version=fork.version, rank=fork.rank.key, replanned=context.previous_fork is not None,
            batch_size=batch_size, sources=[read.source_id for read in fork.reads], reason=fork.reason,
        )  # fmt: skip


def _without_rate(record: InstanceRecord) -> InstanceRecord:
    """Return the record of a target whose plan begins now."""
    return record if record.read_rate is None else replace(record, read_rate=None)


def _plan_for(context: PlanContext, plans_by_fork: Plans) -> Plan:
    """Return or raise the result of one request of a batch."""
    plan = plans_by_fork.get(context.fork_id)
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        raise plan
    detail = f"fork {context.fork_id} ended, or its instance was removed or began another fork"
    raise ProblemError(409, "fork-conflict", detail)


def _record_name(record: InstanceRecord) -> str:
    """Return a readable name for the weights of an instance."""
    return f"version {short(record.version)} of these weights" if record.version else "these weights"
