"""Validates reports and plan requests, and combines them with the existing records."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from planner.core.compact_reports import compact_report
from planner.core.faults import FaultAssessment, assess_faults
from planner.core.problems import ProblemError, check_ranges, invalid_field
from planner.core.records import (
    ForkRecord,
    GroupKey,
    InstanceRecord,
    RouteRecord,
    SourceFaultRecord,
    Witness,
    build_fork_result,
)
from planner.core.state import PlannerState
from planner.core.versions import VersionResolution, resolve
from rfork import weights_version
from rfork.image.ranges import normalise, subtract
from rfork.schema import ForkRequest, InstanceReport, StorageAssignment
from rfork.settings import PlannerSettings
from rfork.tracing import TraceContext

NO_LEASE_KEYS: Final = (
    "it reports that it has no lease keys: it cannot read the planner's responses (version mismatch?)"
)
"""Reason why a seed gets no readers: it would reject all of them."""


@dataclass(frozen=True, slots=True)
class PlanContext:
    """A validated request, with its target's record and the faults of its sources."""

    request: ForkRequest
    target: InstanceRecord
    known: bool
    """True if the instance was known before this request."""
    previous_fork: ForkRecord | None
    assessment: FaultAssessment
    before: InstanceRecord | None = None
    """Record that the target's is based on."""
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
    def instance_id(self) -> str:
        """Id of the target."""
        return self.request.instance.instance_id

    @property
    def group(self) -> GroupKey:
        """Group of instances that it may share weights with."""
        return self.target.group

    @property
    def is_replan(self) -> bool:
        """True if it lost a source or has already begun, so that it must not wait long for other requests."""
        return bool(self.request.faults or self.request.current_assignments or self.target.report.verified)

    @property
    def has_all_sources(self) -> bool:
        """True if its current sources serve all chunks that it is missing, so that it loses nothing by waiting."""
        report, current = self.target.report, self.request.current_assignments
        known = normalise([*report.verified, *(chunks for share in current for chunks in share.chunks)])
        return not self.request.faults and not subtract([(0, report.chunk_count)], known)


def record_report(
    state: PlannerState,
    report: InstanceReport,
    owner: str,
    now: float,
    settings: PlannerSettings,
    chosen_version: str | None = None,
) -> InstanceRecord:
    """Return the instance's record with this report and owner, keeping what else is known about it.

    `chosen_version`: the version that a target gets; None if the report is not that of a target.
    """
    check_ranges("verified", report.verified, report.chunk_count)
    known = state.instance(report.instance_id)
    if chosen_version is not None:
        report = _with_version(report, chosen_version)
    if report.state != "loading":  # the report of a target is replaced with each plan
        report = compact_report(report, known.report if known is not None else None)
    version = _version_by_content(report) if chosen_version is None else chosen_version
    if known is None:
        return InstanceRecord(
            report, seen_at=now, ttl_s=settings.instance_ttl_s, since=now, owner=owner, resolved_version=version
        )
    if chosen_version is None:
        version = version or known.resolved_version
    has_responses = now - known.since >= 2 * settings.heartbeat_interval_s
    quarantined_until, quarantine = known.quarantined_until, known.quarantine
    if report.state == "serving" and not report.has_lease_keys and has_responses:
        quarantined_until, quarantine = now + settings.instance_ttl_s, NO_LEASE_KEYS
    elif now >= quarantined_until or quarantine == NO_LEASE_KEYS:
        quarantined_until, quarantine = 0.0, ""
    return replace(
        known,
        owner=owner,
        report=report,
        seen_at=now,
        reported_missing=False,
        resolved_version=version,
        quarantined_until=quarantined_until,
        quarantine=quarantine,
    )


def check_request(state: PlannerState, request: ForkRequest) -> None:
    """Raise ProblemError for a request that cannot be planned."""
    report, previous_fork = request.instance, state.fork(request.fork_id)
    if report.state != "loading":
        raise invalid_field("instance.state", "must be `loading` to request a fork")
    for share in request.current_assignments:
        check_ranges("current", share.chunks, report.chunk_count)
    if previous_fork is not None and previous_fork.instance_id != report.instance_id:
        raise ProblemError(409, "fork-conflict", f"fork {request.fork_id} belongs to {previous_fork.instance_id}")
    if previous_fork is not None and not previous_fork.live and not previous_fork.abandoned:
        raise ProblemError(409, "fork-ended", f"fork {request.fork_id} has ended: request a plan under another id")


def resolve_version(state: PlannerState, request: ForkRequest) -> VersionResolution:
    """Return the version for the target. Raises ReplicaConflict."""
    report = request.instance
    ranks = list(state.ranks_of(report.replica)) if report.replica is not None else []
    mains: list[InstanceRecord] = []
    if report.rank.role != "main":
        models = {each.report.model for each in ranks if each.report.rank.role == "main"}
        mains = [each for model in models for each in state.members_of(model)]
    members: list[InstanceRecord] = []
    if not _has_own_version(report):
        role, own_id = report.rank.role, report.instance_id
        # A draft's version may depend on the replica of each member.
        few = state.representatives_of(report.model, role, own_id) if role == "main" else None
        members += state.members_of(report.model) if few is None else few
    # Only whether a target keeps the version that it adopted earlier depends on them.
    loading = _storage_readers(state, request) if report.version is not None else ()
    return resolve(report, members, ranks, mains, loading=loading)


def is_settled(state: PlannerState, report: InstanceReport, version: str) -> bool:
    """Return True if no other request can choose another version for this target or its replica."""
    known = state.instance(report.instance_id)
    alone = report.replica is None or weights_version.is_single(report.rank)
    return (known is not None and known.version == version) or (_has_own_version(report) and alone)


def prepare(
    state: PlannerState,
    request: ForkRequest,
    target: InstanceRecord,
    version_note: str,
    witness: Witness,
    avoided_by_host: Mapping[str, SourceFaultRecord],
    now: float,
    heartbeat_s: float,
) -> PlanContext:
    """Return a valid request with the faults that it reports assessed."""
    known, previous_fork = state.instance(witness.instance_id), state.fork(request.fork_id)
    assessment = assess_faults(request.faults, previous_fork, state, now, heartbeat_s, witness, avoided_by_host)
    if known is not None and set(known.report.storage) - set(target.report.storage):
        # The failed storage is no longer offered: the rest is good.
        assessment = assessment.without_instance(witness.instance_id)
    if previous_fork is None and target.slow_since is not None:
        target = replace(target, slow_since=None)
    return PlanContext(
        request,
        target,
        known=known is not None,
        previous_fork=previous_fork,
        assessment=assessment,
        before=known,
        is_scaleup_arrival=target.plan_requested and not (known is not None and known.plan_requested),
        version_note=version_note,
    )


def superseded_fork(state: PlannerState, request: ForkRequest, now: float) -> ForkRecord | None:
    """Return the earlier fork of the same instance, ended, if it still runs."""
    before = state.live_fork_of(request.instance.instance_id)
    if before is None or before.fork_id == request.fork_id:
        return None
    finish = build_fork_result(before, "interrupted", f"the instance began fork {request.fork_id}", now)
    return replace(before, abandoned=True, finish=finish)


def target_record(
    state: PlannerState, request: ForkRequest, version: str, owner: str, now: float, settings: PlannerSettings
) -> InstanceRecord:
    """Return the target's record, marked as a first request unless another planner planned it before a
    restart.
    """
    target = record_report(state, request.instance, owner, now, settings, version)
    begun = bool(request.faults or request.current_assignments)
    return target if target.plan_requested or begun else replace(target, plan_requested=True)


def _with_version(report: InstanceReport, version: str) -> InstanceReport:
    """Return a target's report with the chosen version.

    Chunks of another version are dropped. So is the storage of a target that adopts a version, because its
    files may be of another version.
    """
    changes: dict[str, object] = {}
    if report.version not in (None, version):
        changes = {"version": version, "verified": (), "weights_id": None, "provisional_id": None}
    if not _has_own_version(report) and report.storage and not weights_version.is_unnamed(version):
        changes["storage"] = ()
    return report.model_copy(update=changes) if changes else report


def refresh(state: PlannerState, context: PlanContext, now: float, settings: PlannerSettings) -> PlanContext | None:
    """Return the request combined with the current records of its instance and fork.

    None if the instance was removed or changed its owner meanwhile, or if the fork ended.
    """
    known, owner = state.instance(context.instance_id), context.target.owner
    if context.known if known is None else known.owner not in ("", owner):
        return None
    previous_fork = state.fork(context.fork_id) or context.previous_fork
    if previous_fork is not None and not previous_fork.live and not previous_fork.abandoned:
        return None
    if known is context.before and previous_fork is context.previous_fork:
        return context
    target = target_record(state, context.request, context.target.version, owner, now, settings)
    if previous_fork is None and target.slow_since is not None:
        target = replace(target, slow_since=None)
    return replace(context, previous_fork=previous_fork, target=target, before=known)


def existing_plan(state: PlannerState, context: PlanContext) -> ForkRecord | None:
    """Return the fork if another replica planned it while the request waited here: its target may already
    follow that plan. None if the plan is empty, or reads from a source that this request reports as faulty.
    """
    fork, previous_fork = state.fork(context.fork_id), context.previous_fork
    if fork is None or not fork.live or not (fork.reads or fork.storage):
        return None
    if previous_fork is not None and previous_fork.live and _plan_of(previous_fork) == _plan_of(fork):
        return None
    blamed = {fault.instance_id for fault in context.request.faults}
    return None if blamed.intersection(read.source_id for read in fork.reads) else fork


def _has_own_version(report: InstanceReport) -> bool:
    return report.version is not None and not report.any_version


def _storage_readers(state: PlannerState, request: ForkRequest) -> set[str]:
    """Return the ids of the model's instances that currently read their own storage, including the target."""
    own_id = request.instance.instance_id
    found = {name for group in state.groups_of(request.instance.model) for name in group.storage_readers}
    if any(share.source_id == own_id for share in request.current_assignments):
        found.add(own_id)
    return found


def _version_by_content(report: InstanceReport) -> str:
    """Return a version for an instance that serves weights without a stated one; empty if it serves none."""
    if report.version is not None or report.state == "loading" or report.weights_id is None:
        return ""
    if weights_version.is_single(report.rank):
        return sys.intern(weights_version.of_weights(report.weights_id))
    return weights_version.unnamed(report.replica or report.instance_id)


def _plan_of(fork: ForkRecord) -> tuple[float, tuple[RouteRecord, ...], tuple[StorageAssignment, ...]]:
    return fork.planned_at, fork.reads, fork.storage
