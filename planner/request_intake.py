"""Validates reports and requests, and combines them with the existing records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from planner.accusations import Witness
from planner.faults import QUARANTINE_S, AvoidedByHost, FaultAssessment, FaultBounds, assess_faults
from planner.http_errors import ProblemError, check_ranges, invalid_field, store_busy
from planner.metrics import Metrics
from planner.store.base import CommitConflict, PlannerStore, StoreChange
from planner.store.records import ForkRecord, GroupKey, InstanceRecord, RouteRecord
from planner.versions import ReplicaConflict, VersionResolution, resolve
from rfork import weights_version
from rfork.logs import logger
from rfork.schema import ForkRequest, ForkResult, InstanceReport, StorageAssignment
from rfork.schema.types import Outcome
from rfork.settings import PlannerSettings
from rfork.tracing import TraceContext

ATTEMPTS: Final = 20
"""Maximum attempts to choose a version when other planner replicas choose one concurrently."""
NO_LEASE_KEYS: Final = (
    "it reports that it has no lease keys: it cannot read the planner's responses (version mismatch?)"
)
"""Reason why a seed gets no readers: it would reject all of them."""


@dataclass(frozen=True)
class PlanContext:
    """A validated request, with its target's record and the faults of its sources."""

    request: ForkRequest
    target: InstanceRecord
    known: bool
    """True if the instance was known before this request."""
    previous_fork: ForkRecord | None
    assessment: FaultAssessment
    is_scaleup_arrival: bool = False
    """True if this is the instance's first request, and not a fork that another planner planned."""
    version_note: str = ""
    """Reason for the version, if it is not the target's own."""
    trace: TraceContext | None = None
    """Span of the request, if it is traced."""

    @property
    def fork_id(self) -> str:
        """Id of the fork."""
        return self.request.fork_id

    @property
    def group(self) -> GroupKey:
        """Group of instances that it may share weights with."""
        return self.target.group

    @property
    def is_replan(self) -> bool:
        """True if it lost a source or has already begun, so that it must not wait for other requests."""
        return bool(self.request.faults or self.request.current_assignments or self.target.report.verified)


class RequestIntake:
    """Processes reports and requests before anything is planned."""

    def __init__(self, settings: PlannerSettings, store: PlannerStore, metrics: Metrics) -> None:
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._bounds = FaultBounds(QUARANTINE_S, settings.heartbeat_interval_s)
        self._avoided_by_host = AvoidedByHost()
        self._log = logger("planner.request_intake")

    def record_report(self, report: InstanceReport, owner: str = "") -> InstanceRecord:
        """Return the instance's record with this report and owner, keeping what else is known about it."""
        check_ranges("verified", report.verified, report.chunk_count)
        now, previous_fork = self._store.now(), self._store.state.instance(report.instance_id)
        if previous_fork is None:
            return InstanceRecord(
                report,
                seen_at=now,
                ttl_s=self._settings.instance_ttl_s,
                since=now,
                owner=owner,
                resolved_version=_version_by_content(report),
            )
        record = replace(
            previous_fork,
            owner=owner,
            report=report,
            seen_at=now,
            reported_missing=False,
            resolved_version=_version_by_content(report) or previous_fork.resolved_version,
        )
        if (
            report.state == "serving"
            and not report.has_lease_keys
            and now - previous_fork.since >= 2 * self._settings.heartbeat_interval_s
        ):
            until = now + self._settings.instance_ttl_s
            return replace(record, quarantined_until=until, quarantine=NO_LEASE_KEYS)
        served = now >= previous_fork.quarantined_until or previous_fork.quarantine == NO_LEASE_KEYS
        return replace(record, quarantined_until=0.0, quarantine="") if served else record

    def log_new(self, report: InstanceReport) -> None:
        """Log that an instance is new or changed its state."""
        self._log.info(
            "instance reported", instance_id=report.instance_id, state=report.state, model=report.model,
            version=report.version, rank=report.rank.key, address=report.address,
        )  # fmt: skip

    async def prepare(self, request: ForkRequest, owner: str = "", address: str = "") -> PlanContext:
        """Validate a request and assess the faults it reports. Raises ProblemError."""
        report, state, now = request.instance, self._store.state, self._store.now()
        if report.state != "loading":
            raise invalid_field("instance.state", "must be `loading` to request a fork")
        for share in request.current_assignments:
            check_ranges("current", share.chunks, report.chunk_count)
        previous_fork = state.fork(request.fork_id)
        if previous_fork is not None and previous_fork.instance_id != report.instance_id:
            raise ProblemError(409, "fork-conflict", f"fork {request.fork_id} belongs to {previous_fork.instance_id}")
        if previous_fork is not None and not previous_fork.live and not previous_fork.abandoned:
            raise ProblemError(409, "fork-ended", f"fork {request.fork_id} has ended: request a plan under another id")
        resolution = await self._settle_version(request, owner)
        if previous_fork is None and resolution.choice in ("served", "several"):
            self._metrics.version_chosen(resolution.choice)
        target = self._target(request, resolution.version, owner)
        for fault in request.faults:
            self._metrics.fault(fault)
        witness = Witness(report.instance_id, report.placement.host, address)
        shared = self._avoided_by_host.get(witness, now)
        assessment = assess_faults(request.faults, previous_fork, state.instance, now, self._bounds, witness, shared)
        if request.faults:
            self._avoided_by_host.set(witness, assessment.shared_faults)
        known = state.instance(report.instance_id)
        if known is not None and set(known.report.storage) - set(report.storage):
            assessment = assessment.without_instance(
                report.instance_id
            )  # the failed storage is no longer offered: the rest is good
        before = state.live_fork_of(report.instance_id)
        ended: tuple[ForkRecord, ...] = ()
        if before is not None and before.fork_id != request.fork_id:
            reason = f"the instance began fork {request.fork_id}"
            finish = build_fork_result(before, "interrupted", reason, now)
            self._metrics.fork_abandoned()
            ended = (replace(before, abandoned=True, finish=finish),)
        for record in assessment.changed_records:
            existing = state.instance(record.report.instance_id)
            if now < record.quarantined_until and not (existing and now < existing.quarantined_until):
                self._metrics.quarantined()
                self._log.warning(
                    "source quarantined", instance_id=record.report.instance_id, reason=record.quarantine,
                    fork_id=request.fork_id, quarantine_s=QUARANTINE_S,
                )  # fmt: skip
            elif record.accusations and (existing is None or existing.accusations != record.accusations):
                self._log.warning(
                    "source reported as faulty by a reader", instance_id=record.report.instance_id,
                    reason=record.accusations[-1].reason, fork_id=request.fork_id,
                )  # fmt: skip
        if assessment.changed_records or ended:
            # Before the plan is made, so that the slots of a missing relay are free for it.
            await self._store.commit(StoreChange(instances=assessment.changed_records, forks=ended))
        is_scaleup_arrival = target.plan_requested and not (known is not None and known.plan_requested)
        return PlanContext(
            request, target, known is not None, previous_fork, assessment, is_scaleup_arrival, resolution.note
        )

    async def _settle_version(self, request: ForkRequest, owner: str) -> VersionResolution:
        """Choose the version for the target, so that all ranks of its replica get the same one.

        A choice that depends on other instances is committed before anything is planned: if two requests
        reach two replicas of the planner, one of them must see the other's choice. Raises ProblemError.
        """
        report, state = request.instance, self._store.state
        key = GroupKey(report.model, "", "")
        own_version = report.version is not None and not report.any_version
        for _ in range(ATTEMPTS):
            changes = self._store.version(key)
            ranks = list(state.ranks_of(report.replica)) if report.replica is not None else []
            models = {each.report.model for each in ranks if each.report.rank.role == "main"}
            mains = [each for model in models for each in state.members_of(model)]
            members = [] if own_version else list(state.members_of(report.model))
            try:
                resolution = resolve(
                    report,
                    members,
                    ranks,
                    mains if report.rank.role != "main" else (),
                    loading=self._loading(request, members),
                )
            except ReplicaConflict as error:
                self._metrics.version_chosen("conflict")
                raise ProblemError(409, "replica-version", str(error)) from None
            known = state.instance(report.instance_id)
            settled = known is not None and known.version == resolution.version
            alone = report.replica is None or weights_version.is_single(report.rank)
            if settled or (own_version and alone):
                return resolution
            record = self._with_version(self.record_report(report, owner), resolution.version)
            try:
                await self._store.commit(StoreChange(instances=(record,), group=key, version=changes))
            except CommitConflict:
                self._metrics.store_conflict()
                continue
            return resolution
        raise store_busy()

    def _loading(self, request: ForkRequest, members: Iterable[InstanceRecord]) -> set[str]:
        """Return the ids of the instances that currently read their own storage, including the target."""
        own = request.instance.instance_id
        names = [record.report.instance_id for record in members]
        forks = ((name, self._store.state.live_fork_of(name)) for name in names)
        found = {name for name, fork in forks if fork is not None and fork.storage}
        if any(share.source_id == own for share in request.current_assignments):
            found.add(own)
        return found

    def _with_version(self, record: InstanceRecord, version: str) -> InstanceRecord:
        """Return the record with the chosen version.

        Chunks of another version are dropped. So is the storage of a target that adopts a version, because
        its files may be of another version.
        """
        report, changes = record.report, dict[str, object]()
        if report.version not in (None, version):
            changes = {"version": version, "verified": (), "weights_id": None, "provisional_id": None}
        adopts_served_version = report.version is None or report.any_version
        if adopts_served_version and report.storage and not weights_version.is_unnamed(version):
            changes["storage"] = ()
        report = report.model_copy(update=changes) if changes else report
        return replace(record, report=report, resolved_version=version)

    def _target(self, request: ForkRequest, version: str, owner: str) -> InstanceRecord:
        """Return the target's record, marked as a first request unless another planner planned it before a
        restart.
        """
        target = self._with_version(self.record_report(request.instance, owner), version)
        begun = bool(request.faults or request.current_assignments)
        return target if target.plan_requested or begun else replace(target, plan_requested=True)

    def refresh(self, context: PlanContext) -> PlanContext | None:
        """Return the request combined with the current records of its instance and fork.

        None if the instance was removed or changed its owner meanwhile, or if the fork ended.
        """
        report, state, owner = context.request.instance, self._store.state, context.target.owner
        known = state.instance(report.instance_id)
        if context.known if known is None else known.owner not in ("", owner):
            return None
        previous_fork = state.fork(context.fork_id) or context.previous_fork
        if previous_fork is not None and not previous_fork.live and not previous_fork.abandoned:
            return None
        target = self._target(context.request, context.target.version, owner)
        return replace(
            context,
            previous_fork=previous_fork,
            target=target if previous_fork else replace(target, slow_since=None),
        )

    def existing_plan(self, context: PlanContext) -> ForkRecord | None:
        """Return the fork if another replica planned it while the request waited here: its target may already
        follow that plan. None if the plan is empty, or reads from a source that this request reports as
        faulty.
        """
        fork, previous_fork = self._store.state.fork(context.fork_id), context.previous_fork
        if fork is None or not fork.live or not (fork.reads or fork.storage):
            return None
        if previous_fork is not None and previous_fork.live and _plan_of(previous_fork) == _plan_of(fork):
            return None
        blamed = {fault.instance_id for fault in context.request.faults}
        return None if blamed.intersection(read.source_id for read in fork.reads) else fork


def _version_by_content(report: InstanceReport) -> str:
    """Return a version for an instance that serves weights without a stated one; empty if it serves none."""
    if report.version is not None or report.state == "loading" or report.weights_id is None:
        return ""
    if weights_version.is_single(report.rank):
        return weights_version.of_weights(report.weights_id)
    return weights_version.unnamed(report.replica or report.instance_id)


def _plan_of(fork: ForkRecord) -> tuple[float, tuple[RouteRecord, ...], tuple[StorageAssignment, ...]]:
    return fork.planned_at, fork.reads, fork.storage


def build_fork_result(fork: ForkRecord, outcome: Outcome, reason: str, now: float) -> ForkResult:
    """Return the result of a fork that the planner ends on behalf of its target."""
    progress = fork.progress
    return ForkResult(
        outcome=outcome,
        seconds=max(0.0, now - fork.requested_at),
        bytes_read=progress.bytes_read if progress else 0,
        sources=progress.sources if progress else {},
        transports=progress.transports if progress else {},
        phases=progress.phases if progress else {},
        link_bytes_per_s=progress.link_bytes_per_s if progress else None,
        reasons=(reason,),
    )
