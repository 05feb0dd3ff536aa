"""Which version of a model's weights a fork gets: pure decisions over the records of instances.

A target with a version of its own gets that one and no other. A target without one takes over the version
that is served, where exactly one is. All ranks of a replica get one version: the first one that any of them
got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from planner.store.records import InstanceRecord
from rfork import weights_version
from rfork.wire import InstanceReport

NAMED: Final = 8
"""Versions that a reason lists at most."""


class ReplicaConflict(Exception):
    """A rank has another version of its own than the replica that it belongs to."""


@dataclass(frozen=True)
class Resolution:
    """The version that a fork gets; `note` says why, where it is not the target's own."""

    version: str
    choice: Literal["own", "served", "several", "none"]
    """`own`: the target's. `served`: one that is served, or that its replica has. `several`: none, as several
    are served. `none`: none is served."""
    note: str = ""


def resolve(
    report: InstanceReport,
    members: Sequence[InstanceRecord],
    ranks: Iterable[InstanceRecord],
    mains: Iterable[InstanceRecord] = (),
    *,
    loading: Collection[str] = (),
) -> Resolution:
    """Return the version that the target of `report` gets.

    `members` are the known instances of its model, `ranks` those of its replica, of any model, and `mains`,
    for a speculative model, the instances of the main models of its replica.
    `loading` are the ids of instances that read their own storage by their current plans.

    Raises ReplicaConflict where the target's own version is not its replica's.
    """
    role, own_id = report.rank.role, report.instance_id
    replica = [record for record in ranks if record.report.instance_id != own_id]
    fixed = Counter(
        record.version
        for record in replica
        if (record.report.model, record.report.rank.role) == (report.model, role)
        and record.version
        and _position(record.report) != _position(report)  # an earlier process of this very rank
    )
    if report.version is not None and not report.any_version:
        for version in fixed:
            if version != report.version:
                raise ReplicaConflict(
                    f"replica {report.replica} began with version {version}, "
                    f"but the files of rank {report.rank.key} are version {report.version}"
                )
        return Resolution(report.version, "own")
    if fixed:
        return _taken_over(max(fixed, key=lambda version: (fixed[version], version)))
    alike = [
        record
        for record in members
        if record.report.rank.role == role and record.report.instance_id != own_id
    ]
    current = report.version
    if current is not None and (own_id in loading or _can_complete(current, report, alike, loading)):
        return _taken_over(current)
    served = _served(alike)
    if len(served) > 1 and role != "target":
        served = _served_with_main(alike, mains, replica) or served
    if len(served) == 1:
        return _taken_over(next(iter(served)))
    unnamed = weights_version.unnamed(report.replica or own_id)
    if not served:
        # Where what it took over is gone, it must not read other weights under that name.
        return _taken_over(current if current and weights_version.is_unnamed(current) else unnamed)
    listed = sorted(served)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return Resolution(
        unnamed,
        "several",
        f"{len(listed)} versions of {report.model} are served ({', '.join(listed[:NAMED])}{more}) "
        f"and {weights_version.UNSTATED}: set RFORK_VERSION",
    )


def _taken_over(version: str) -> Resolution:
    if weights_version.is_unnamed(version):
        return Resolution(version, "none")
    return Resolution(version, "served", f"{weights_version.TAKEN_OVER} {weights_version.short(version)}")


def _position(report: InstanceReport) -> tuple[str, int]:
    return report.rank.key, report.rank.dp


def _can_complete(
    version: str, report: InstanceReport, alike: Iterable[InstanceRecord], loading: Collection[str]
) -> bool:
    """Return whether another instance holds all of this rank of the version, or reads it from storage."""
    return any(
        record.version == version
        and record.report.rank.key == report.rank.key
        and (record.source.complete or record.report.instance_id in loading)
        for record in alike
    )


def _served(records: Sequence[InstanceRecord]) -> set[str]:
    """Return the versions that complete instances serve; without any, those that instances are getting."""
    complete = {
        record.version for record in records if record.source.complete and record.source.state != "draining"
    }
    return (complete or {record.version for record in records if record.asked or record.resolved_version}) - {
        ""
    }


def _served_with_main(
    drafts: Sequence[InstanceRecord], mains: Iterable[InstanceRecord], replica: Sequence[InstanceRecord]
) -> set[str]:
    """Return the versions of a speculative model that replicas of this replica's main version serve."""
    own = {
        (record.report.model, record.version)
        for record in replica
        if record.report.rank.role == "target" and record.version
    }
    replicas = {
        record.report.replica
        for record in mains
        if record.report.replica and (record.report.model, record.version) in own
    }
    return _served([record for record in drafts if record.report.replica in replicas])
