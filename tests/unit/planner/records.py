"""Builders for the planner's records."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from planner.core.records import ForkRecord, GroupKey, HolderRecord, InstanceRecord, ScaleUpRecord
from rfork.schema import ForkResult, HolderReport, Placement, Rank, ScaleUp
from tests.unit.planner.builders import VERSION, seed_report

GROUP: Final = GroupKey("m", VERSION, Rank().key)
FORKED: Final = ForkResult(outcome="forked", seconds=1, bytes_read=1)


def instance(name: str, *, seen_at: float = 0.0, **changes: object) -> InstanceRecord:
    """Return a seed's record with a TTL of ten seconds; `changes` apply to its report."""
    return InstanceRecord(seed_report(name, **changes), seen_at=seen_at, ttl_s=10.0)


def fork(name: str, *, ended: bool = False, **changes: object) -> ForkRecord:
    """Return the record of fork `name`, whose target is `of-name`."""
    record = ForkRecord(
        fork_id=name, instance_id=f"of-{name}", model=GROUP.model, version=VERSION, rank=Rank(),
        chunk_count=1, image_bytes=1, requested_at=0.0, planned_at=0.0, seen_at=0.0,
        finish=FORKED if ended else None,
    )  # fmt: skip
    return replace(record, **changes)  # type: ignore[arg-type]  # each test names fields of ForkRecord


def scaleup(name: str, replicas: int, *, expires_at: float = 900.0) -> ScaleUpRecord:
    """Return the record of a scale-up of the group's model."""
    announcement = ScaleUp(scaleup_id=name, model=GROUP.model, replicas=replicas)
    return ScaleUpRecord(announcement, first_at=0.0, expires_at=expires_at)


def holder(name: str, *, seen_at: float = 0.0, **changes: object) -> HolderRecord:
    """Return the record of a holder on host `node` with a TTL of ten seconds; `changes` apply to its report."""
    values = {"holder_id": name, "placement": Placement(host="node"), "memory_bytes": 1 << 30}
    return HolderRecord(HolderReport.model_validate(values | changes), seen_at=seen_at, ttl_s=10.0)
