"""Registry of instances, forks and plans.

Call from the event loop's thread only. Decisions are made from the store's state and take effect once the
store has accepted them; see `planner.store.base` for concurrent changes by two replicas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from planner.accusations import Witness
from planner.faults import QUARANTINE_S, FaultBounds, contradictions
from planner.http_errors import ProblemError, check_ranges, store_busy
from planner.leases import Clock, LeaseSigner
from planner.metrics import Metrics
from planner.ownership import PLANNER, Claimant
from planner.plan_response import RETRY_S, PlanResponseBuilder
from planner.plan_service import ATTEMPTS, PlanService
from planner.policy import group_plan
from planner.policy.transports import is_same_host_route
from planner.request_batcher import RequestBatcher, ScaleUpBatching
from planner.request_intake import PlanContext, RequestIntake, build_fork_result
from planner.scaleups import ScaleUpRegistry
from planner.source_rate_limits import source_rate_limits
from planner.state import PlannerState
from planner.store.base import CommitConflict, PlannerStore, StoreChange, StoreUnavailable
from planner.store.records import ForkRecord, InstanceRecord
from planner.tracing import TracedPlanner
from rfork.logs import logger
from rfork.schema import (
    ExitCheck,
    ForkProgress,
    ForkRequest,
    ForkResult,
    InstanceAck,
    InstanceReport,
    Plan,
    ProgressAck,
)
from rfork.schema.types import Outcome
from rfork.settings import PlannerSettings
from rfork.tracing import NOOP_TRACER, Tracer
from rfork.weights_version import is_single, short

SWEEP_INTERVAL_S: Final = 1.0
FIRST_HEARTBEAT_FRACTION: Final = 0.9
"""Fraction of the heartbeat interval after which every instance has reported: they send at 0.8 of it."""
MIN_FORKS_FOR_STRAGGLERS: Final = 3
"""Minimum number of running forks in a group before one of them can be judged slow."""


class Registry:
    """Registers instances, plans forks and tracks them until they finish."""

    def __init__(
        self,
        settings: PlannerSettings,
        store: PlannerStore,
        clock: Clock,
        metrics: Metrics,
        tracer: Tracer = NOOP_TRACER,
    ) -> None:
        self.store = store
        self._settings = settings
        self._metrics = metrics
        self._lease_signer = LeaseSigner(
            tuple(key.get_secret_value() for key in settings.lease_keys), ttl_s=settings.lease_ttl_s, clock=clock
        )
        self._request_intake = RequestIntake(settings, store, metrics)
        self._response_builder = PlanResponseBuilder(store, self._lease_signer)
        self._fault_bounds = FaultBounds(QUARANTINE_S, settings.heartbeat_interval_s)
        self.scaleups = ScaleUpRegistry(store)
        metrics.track_scaleups(self.scaleups.count)
        scaleup_batching = ScaleUpBatching(
            self.scaleups, settings.scaleup_wait_s, self._register_arrival, metrics.scaleup_batched
        )
        planning = PlanService(
            store, self._request_intake, self._response_builder, metrics, settings.heartbeat_interval_s
        )
        self._plans = TracedPlanner(planning.plan, lambda group: len(self.state.group(group).sources), tracer)
        self._batches = RequestBatcher(settings.batch_window_s, self._plans, clock.monotonic, scaleup_batching)
        self._next_sweep = 0.0
        self._warm_at: float | None = None
        """When every running instance has reported, if the planner started without records."""
        self._log = logger("planner.registry")

    @property
    def state(self) -> PlannerState:
        """All records known to this replica."""
        return self.store.state

    def now(self) -> float:
        """Return the store's time in seconds."""
        return self.store.now()

    # -- instances --------------------------------------------------------------------------------

    async def report(self, report: InstanceReport, claimant: Claimant = PLANNER) -> InstanceAck:
        """Register an instance, or process its heartbeat."""
        await self.sweep()
        old = self.state.instance(report.instance_id)
        record = self._request_intake.record_report(report, claimant.owner_of(report.instance_id, old))
        await self.store.commit(StoreChange(instances=(record,)))
        if old is None or old.report.state != report.state:
            self._request_intake.log_new(report)
        return InstanceAck(
            heartbeat_s=self._settings.heartbeat_interval_s,
            lease_keys=self._lease_signer.keys_of(report.instance_id, record.owner),
            unix_s=self._lease_signer.unix_time,
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
        waiting = [name for name in group.shares if name != instance_id]
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

    async def request_plan(self, request: ForkRequest, claimant: Claimant = PLANNER) -> Plan:
        """Plan a fork, or replan it around the sources that failed it."""
        await self.sweep()
        if self._is_early(request.instance):
            reason = "the planner has just started: it does not know the replica's version yet"
            return Plan(fork_id=request.fork_id, reason=reason, retry_after_s=RETRY_S)
        name, old = request.instance.instance_id, self.state.fork(request.fork_id)
        owner = claimant.owner_of(name, self.state.instance(name))
        if old is not None:
            claimant.check_can_change_fork(old)
        context = await self._request_intake.prepare(request, owner, claimant.address)
        return await self._plans.trace_wait(context, self._batches.add)

    def _is_early(self, report: InstanceReport) -> bool:
        """Return True if the target's replica may have a version that its other ranks have not reported yet.

        That is so until every instance had time for a heartbeat, if the planner started without records.
        """
        if report.version is not None or (is_single(report.rank) and report.rank.role == "main"):
            return False
        return self._warm_at is not None and self.now() < self._warm_at

    async def _register_arrival(self, context: PlanContext) -> None:
        """Record the arrival of an expected replica, so that every replica of the planner knows immediately."""
        await self.store.commit(StoreChange(instances=(context.target,)))
        if not context.known:
            self._request_intake.log_new(context.request.instance)

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
        rate_limits = source_rate_limits(fork, self.state.instance)
        before, fork = fork, replace(fork, progress=progress, source_rate_limits=rate_limits, seen_at=now)
        target = self.state.instance(fork.instance_id)
        instances: tuple[InstanceRecord, ...] = ()
        if target is not None:
            report = target.report.model_copy(update={"verified": progress.verified})
            # A read rate within the host does not indicate the link's speed.
            same_host_read = any(is_same_host_route(read.transports) for read in fork.reads)
            fastest = max(target.ingress_rate or 0.0, 0.0 if same_host_read else progress.bytes_per_s) or None
            witness = Witness(fork.instance_id, target.report.placement.host, claimant.address)
            changed_accusers = contradictions(before, progress, witness, self.state.instance, now, self._fault_bounds)
            target = next((each for each in changed_accusers if each.report.instance_id == fork.instance_id), target)
            others = tuple(each for each in changed_accusers if each.report.instance_id != fork.instance_id)
            instances = (
                replace(target, report=report, seen_at=now, reported_missing=False, ingress_rate=fastest), *others,
            )  # fmt: skip
        try:
            await self.store.commit(StoreChange(instances=instances, forks=(fork,)))
        except StoreUnavailable as error:
            # An unavailable store must not end running forks: their leases are renewed anyway.
            self._log.warning("progress not stored", fork_id=fork_id, reason=str(error))
        return self._response_builder.renew_leases(fork)

    async def finish(self, fork_id: str, finish: ForkResult, claimant: Claimant = PLANNER) -> None:
        """Finish a fork; an unknown or finished fork has no lease to release."""
        fork = self.state.fork(fork_id)
        if fork is None:
            await self._batches.cancel(fork_id)
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
        await self.store.commit(StoreChange(instances=instances, forks=(ended,)))

    # -- periodic work -----------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Forget silent instances, abandon silent forks, mark slow relays, forget expired scale-ups.

        Runs at most once a second.
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
        slow, expired = tuple(self._find_stragglers(now)), self.scaleups.expired()
        if forks or removed or slow or expired:
            change = StoreChange(instances=slow, forks=tuple(forks.values()), removed=tuple(removed), withdrawn=expired)
            try:
                await self.store.commit(change)
            except StoreUnavailable as error:
                self._log.warning("failed to remove silent instances and forks, retrying", reason=str(error))

    def _find_stragglers(self, now: float) -> list[InstanceRecord]:
        """Return relays that have started to fall behind since the last sweep."""
        found: list[InstanceRecord] = []
        for group in self.state.groups():
            if len(group.shares) < MIN_FORKS_FOR_STRAGGLERS:
                continue
            for instance_id in group_plan.stragglers(group.view(()), now):
                record = self.state.instance(instance_id)
                if record is not None and record.slow_since is None:
                    found.append(replace(record, slow_since=now))
                    self._log.warning("relay falling behind", instance_id=instance_id, model=group.model)
        return found

    def _is_last_seed(self, record: InstanceRecord) -> bool:
        """Return True if no other readable instance has the same complete weights."""
        source = record.source
        if not source.complete:
            return False
        holder_count = self.state.group(record.group).holders_of(source.layout_id).get((source.weights_id, None))
        others = (holder_count.seeds if holder_count else 0) - (source.state != "draining" and not source.quarantine)
        return others <= 0

    def _expected_suffix(self, record: InstanceRecord) -> str:
        """Return a message suffix about the replicas expected in its group; empty if there are none."""
        count = self.scaleups.expected(record.group)
        return f", and {count} replica{' is' if count == 1 else 's are'} expected" if count else ""

    def _abandon(self, fork: ForkRecord, outcome: Outcome, reason: str) -> ForkRecord:
        """End a fork on behalf of its target, which may still request a plan under the same id."""
        return self._end_fork(replace(fork, abandoned=True), build_fork_result(fork, outcome, reason, self.now()))

    def _end_fork(self, fork: ForkRecord, finish: ForkResult) -> ForkRecord:
        if fork.abandoned:
            self._metrics.fork_abandoned()
        else:
            self._metrics.ended(finish, self.state.group(fork.group).history.durations.seconds_saved(fork, finish))
        self._log.info(
            "fork ended", fork_id=fork.fork_id, instance_id=fork.instance_id, outcome=finish.outcome,
            seconds=finish.seconds, bytes_read=finish.bytes_read, sources=finish.sources,
            reasons=finish.reasons,
        )  # fmt: skip
        return replace(fork, finish=finish, source_rate_limits=source_rate_limits(fork, self.state.instance))


def _record_name(record: InstanceRecord) -> str:
    """Return a readable name for the weights of an instance."""
    return f"version {short(record.version)} of these weights" if record.version else "these weights"
