"""Version resolution: decides which version of a model's weights a fork gets. Pure, over instance records.

A target with a version of its own gets that one and no other. A target without one adopts the served version,
if exactly one is served. All ranks of a replica get the same version: the first one that any of them got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from planner.core.records import InstanceRecord
from rfork import weights_version
from rfork.schema import InstanceReport

MAX_NAMED: Final = 8
"""Maximum number of versions listed in a reason."""


class ReplicaConflict(Exception):
    """A rank has another version of its own than its replica."""


@dataclass(frozen=True, slots=True)
class VersionResolution:
    """The resolved version of a fork; `note` states the reason if it is not the target's own."""

    version: str
    choice: Literal["own", "served", "several", "none"]
    """`own_replica`: the target's own. `served`: one that is served, or that its replica has. `several`:
    none, because several are served. `none`: none is served.
    """
    note: str = ""


def resolve(
    report: InstanceReport,
    members: Sequence[InstanceRecord],
    ranks: Iterable[InstanceRecord],
    mains: Iterable[InstanceRecord] = (),
    *,
    loading: Collection[str] = (),
) -> VersionResolution:
    """Return the version for the target of `report`.

    `members` are the known instances of its model, `ranks` those of its replica, of any model, and `mains`,
    for a speculative model, the instances of the main models of its replica. `loading` are the ids of
    instances that currently read their own storage.

    Raises ReplicaConflict if the target's own version differs from its replica's.
    """
    role, own_id = report.rank.role, report.instance_id
    replica = [record for record in ranks if record.report.instance_id != own_id]
    replica_versions = [
        record.version
        for record in replica
        if (record.report.model, record.report.rank.role) == (report.model, role)
        and record.version
        and _position(record.report) != _position(report)  # an earlier process of the same rank
    ]
    if report.version is not None and not report.any_version:
        for version in replica_versions:
            if version != report.version:
                raise ReplicaConflict(
                    f"replica {report.replica} uses version {version}, "
                    f"but the files of rank {report.rank.key} are version {report.version}"
                )
        return VersionResolution(report.version, "own")
    if replica_versions:
        counts = Counter(replica_versions)
        return _resolve_to(max(counts, key=lambda version: (counts[version], version)))
    same_role = [
        record for record in members if record.report.rank.role == role and record.report.instance_id != own_id
    ]
    reported_version = report.version
    if reported_version is not None and (
        own_id in loading or _can_complete(reported_version, report, same_role, loading)
    ):
        return _resolve_to(reported_version)
    served = _served(same_role)
    if len(served) > 1 and role != "main":
        served = _served_with_main(same_role, mains, replica) or served
    if len(served) == 1:
        return _resolve_to(next(iter(served)))
    unnamed_version = weights_version.unnamed(report.replica or own_id)
    if not served:
        # If the adopted version is no longer served, it must not read other weights under that name.
        return _resolve_to(
            reported_version if reported_version and weights_version.is_unnamed(reported_version) else unnamed_version
        )
    sorted_versions = sorted(served)
    more = f" and {len(sorted_versions) - MAX_NAMED} more" if len(sorted_versions) > MAX_NAMED else ""
    return VersionResolution(
        unnamed_version,
        "several",
        f"{len(sorted_versions)} versions of {report.model} are served ({', '.join(sorted_versions[:MAX_NAMED])}{more})"
        f" and {weights_version.UNSTATED}",
    )


def _resolve_to(version: str) -> VersionResolution:
    if weights_version.is_unnamed(version):
        return VersionResolution(version, "none")
    return VersionResolution(version, "served", f"{weights_version.ADOPTS_VERSION} {weights_version.short(version)}")


def _position(report: InstanceReport) -> tuple[str, int]:
    return report.rank.key, report.rank.dp


def _can_complete(
    version: str, report: InstanceReport, same_role: Iterable[InstanceRecord], loading: Collection[str]
) -> bool:
    """Return True if another instance has this rank of the version complete, or reads it from storage."""
    return any(
        record.version == version
        and record.report.rank.key == report.rank.key
        and (record.source.complete or record.report.instance_id in loading)
        for record in same_role
    )


def _served(records: Sequence[InstanceRecord]) -> set[str]:
    """Return the versions that complete engines serve; if none, those of holders; if none, those in transfer.

    Holders keep an earlier version for a while, which must not make the choice ambiguous during a rollout.
    """
    engines: set[str] = set()
    holders: set[str] = set()
    for record in records:
        source = record.source
        if source.complete and source.state != "draining":
            (engines if source.holder is None else holders).add(record.version)
    served = engines or holders
    return (served or {record.version for record in records if record.plan_requested or record.resolved_version}) - {""}


def _served_with_main(
    speculative: Sequence[InstanceRecord], mains: Iterable[InstanceRecord], replica: Sequence[InstanceRecord]
) -> set[str]:
    """Return the speculative model's versions served by replicas of this replica's main version."""
    own_replica = {
        (record.report.model, record.version)
        for record in replica
        if record.report.rank.role == "main" and record.version
    }
    replicas = {
        record.report.replica
        for record in mains
        if record.report.replica and (record.report.model, record.version) in own_replica
    }
    return _served([record for record in speculative if record.report.replica in replicas])
