"""What instances and forks say, taken in: checked, and put with what is known of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from planner.accusations import Witness
from planner.faults import AvoidedByHost, FaultAssessment, FaultBounds, assess_faults
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
"""How often a version is chosen again because another replica of the planner chose one at the same time."""
UNCONFIRMED_PLAN_S: Final = (
    "it reports that it holds no lease keys: it cannot read the planner's answers (another version?)"
)
"""Why a seed gets no readers that would refuse every one of them."""


@dataclass(frozen=True)
class PlanContext:
    """A request that was checked, with what it says of its target and its sources."""

    request: ForkRequest
    target: InstanceRecord
    known: bool
    """Whether the instance was known before it asked."""
    previous_fork: ForkRecord | None
    assessment: FaultAssessment
    is_scaleup_arrival: bool = False
    """Whether its instance asks for the first time, and not for a fork that somebody else planned."""
    version_note: str = ""
    """Why it gets its version, where that is not its own."""
    trace: TraceContext | None = None
    """The span of its request, where that is traced."""

    @property
    def fork_id(self) -> str:
        """The fork's id."""
        return self.request.fork_id

    @property
    def group(self) -> GroupKey:
        """What it may share weights with."""
        return self.target.group

    @property
    def is_replan(self) -> bool:
        """Whether it lost a source, or has begun: it must not wait for others."""
        return bool(self.request.faults or self.request.current_assignments or self.target.report.verified)


class RequestIntake:
    """Takes reports and requests in, before anything is planned."""

    def __init__(self, settings: PlannerSettings, store: PlannerStore, metrics: Metrics) -> None:
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._bounds = FaultBounds(settings.quarantine_s, settings.heartbeat_interval_s)
        self._avoided_by_host = AvoidedByHost()
        self._log = logger("planner.request_intake")

    def record_report(self, report: InstanceReport, owner: str = "") -> InstanceRecord:
        """The instance's record with this report and owner, and with what was found out about it before."""
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
            return replace(record, quarantined_until=until, quarantine=UNCONFIRMED_PLAN_S)
        served = now >= previous_fork.quarantined_until or previous_fork.quarantine == UNCONFIRMED_PLAN_S
        return replace(record, quarantined_until=0.0, quarantine="") if served else record

    def log_new(self, report: InstanceReport) -> None:
        """An instance is new, or in another state than it was."""
        self._log.info(
            "instance reported", instance_id=report.instance_id, state=report.state, model=report.model,
            version=report.version, rank=report.rank.key, address=report.address,
        )  # fmt: skip

    async def prepare(self, request: ForkRequest, owner: str = "", address: str = "") -> PlanContext:
        """Check a request and weigh the faults it reports. Raises ProblemError."""
        report, state, now = request.instance, self._store.state, self._store.now()
        if report.state != "loading":
            raise invalid_field("instance.state", "an instance that asks for a fork is loading")
        for share in request.current_assignments:
            check_ranges("current", share.chunks, report.chunk_count)
        previous_fork = state.fork(request.fork_id)
        if previous_fork is not None and previous_fork.instance_id != report.instance_id:
            raise ProblemError(409, "fork-conflict", f"fork {request.fork_id} belongs to {previous_fork.instance_id}")
        if previous_fork is not None and not previous_fork.live and not previous_fork.abandoned:
            raise ProblemError(409, "fork-ended", f"fork {request.fork_id} has ended: ask under another id")
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
            )  # what failed is offered no more: the rest is good
        before = state.live_fork_of(report.instance_id)
        ended: tuple[ForkRecord, ...] = ()
        if before is not None and before.fork_id != request.fork_id:
            why = f"its instance began fork {request.fork_id}"
            finish = build_fork_result(before, "interrupted", why, now)
            self._metrics.fork_abandoned()
            ended = (replace(before, abandoned=True, finish=finish),)
        for record in assessment.changed_records:
            existing = state.instance(record.report.instance_id)
            if now < record.quarantined_until and not (existing and now < existing.quarantined_until):
                self._metrics.quarantined()
                self._log.warning(
                    "source quarantined", instance_id=record.report.instance_id, reason=record.quarantine,
                    fork_id=request.fork_id, quarantine_s=self._settings.quarantine_s,
                )  # fmt: skip
            elif record.accusations and (existing is None or existing.accusations != record.accusations):
                self._log.warning(
                    "source accused", instance_id=record.report.instance_id,
                    reason=record.accusations[-1].reason, fork_id=request.fork_id,
                )  # fmt: skip
        if assessment.changed_records or ended:
            # Before the plan is made: the slots of a relay that is gone are free for it.
            await self._store.commit(StoreChange(instances=assessment.changed_records, forks=ended))
        is_scaleup_arrival = target.asked_for_plan and not (known is not None and known.asked_for_plan)
        return PlanContext(
            request, target, known is not None, previous_fork, assessment, is_scaleup_arrival, resolution.note
        )

    async def _settle_version(self, request: ForkRequest, owner: str) -> VersionResolution:
        """Choose the version that the target gets, so that all ranks of its replica get the same.

        A choice that depends on other instances is committed before anything is planned: of two requests that
        reach two replicas of the planner, one has to see the other's choice. Raises ProblemError.
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
        """Return the ids of those that read their own storage by their current plans, the target included."""
        own = request.instance.instance_id
        names = [record.report.instance_id for record in members]
        forks = ((name, self._store.state.live_fork_of(name)) for name in names)
        found = {name for name, fork in forks if fork is not None and fork.storage}
        if any(share.source_id == own for share in request.current_assignments):
            found.add(own)
        return found

    def _with_version(self, record: InstanceRecord, version: str) -> InstanceRecord:
        """Return the record with the version that was chosen for it.

        Chunks of another version do not count. Nor does storage of a target that takes over a version, as
        nothing says that it holds that one.
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
        """The target's record, which says that it has asked unless others planned for it before a restart."""
        target = self._with_version(self.record_report(request.instance, owner), version)
        begun = bool(request.faults or request.current_assignments)
        return target if target.asked_for_plan or begun else replace(target, asked_for_plan=True)

    def refresh(self, context: PlanContext) -> PlanContext | None:
        """The request on top of what is known of its instance and its fork now.

        None where the instance was removed meanwhile or got another owner, or the fork ended.
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
        """The fork, where another replica planned it while the request waited here: its target may follow
        that plan by now. None where there is nothing to read in it, or only what the request complains of.
        """
        fork, previous_fork = self._store.state.fork(context.fork_id), context.previous_fork
        if fork is None or not fork.live or not (fork.reads or fork.storage):
            return None
        if previous_fork is not None and previous_fork.live and _plan_of(previous_fork) == _plan_of(fork):
            return None
        blamed = {fault.instance_id for fault in context.request.faults}
        return None if blamed.intersection(read.source_id for read in fork.reads) else fork


def _version_by_content(report: InstanceReport) -> str:
    """Return a version for an instance that serves weights and names none; empty for one that serves none."""
    if report.version is not None or report.state == "loading" or report.weights_id is None:
        return ""
    if weights_version.is_single(report.rank):
        return weights_version.of_weights(report.weights_id)
    return weights_version.unnamed(report.replica or report.instance_id)


def _plan_of(fork: ForkRecord) -> tuple[float, tuple[RouteRecord, ...], tuple[StorageAssignment, ...]]:
    return fork.planned_at, fork.reads, fork.storage


def build_fork_result(fork: ForkRecord, outcome: Outcome, reason: str, now: float) -> ForkResult:
    """How a fork ended that its target did not end."""
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
