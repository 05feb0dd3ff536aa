"""Announced scale-ups: the replicas to wait for, so that all that start together share one plan.

The planner does not know which instance belongs to which replica of a model, nor how many ranks a replica
has. It counts separately for each group and data-parallel index: there, each replica has one instance,
whether its ranks run in one Pod or in several. An instance that restarts as the same replica counts once. The
replica is the part of its id before its rank (``REPLICA-RANK-…``, with RFORK_REPLICA set, as in Pods); else
its Pod; else its own id. If a model's replicas differ in their data-parallel size, those with fewer ranks
wait until the timeout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from typing_extensions import Self

from planner.core.group_index import GroupIndex
from planner.core.records import GroupKey, InstanceRecord, ScaleUpRecord
from rfork.schema import InstanceReport, ScaleUp, ScaleUpInfo
from rfork.weights_version import short

Position = tuple[str, int]
"""Rank key and data-parallel index: each replica has one instance per position."""


def replica_key(report: InstanceReport) -> str:
    """Return the key that an instance keeps when it restarts."""
    replica, found, _ = report.instance_id.rpartition(f"-{report.rank.key}-")
    if found and replica:
        return replica
    return report.placement.pod or report.instance_id


class ExpectedReplicas:
    """A scale-up, and its replicas that have arrived."""

    def __init__(self, record: ScaleUpRecord) -> None:
        self.record = record
        self.replicas: set[str] = set()
        self._arrived: dict[Position, set[str]] = {}

    def accepts_version(self, version: str) -> bool:
        """Return True if replicas of this version (empty: not resolved) may be part of the scale-up."""
        return not version or self.record.scaleup.version in (None, version)

    def remaining(self, position: Position) -> int:
        """Return the number of replicas whose instance at this position has not arrived."""
        return max(0, self.record.expected - len(self._arrived.get(position, ())))

    def add(self, position: Position, replica: str) -> None:
        """Record the arrival of a replica's instance at this position."""
        self.replicas.add(replica)
        self._arrived.setdefault(position, set()).add(replica)

    @property
    def max_position_count(self) -> int:
        """Number of replicas of which any rank arrived: two Pods of one replica have different
        positions.
        """
        max_arrived = max((len(arrived_replicas) for arrived_replicas in self._arrived.values()), default=0)
        return min(max_arrived, self.record.expected)

    @property
    def arrived_since(self) -> int:
        """Number of replicas that arrived since the last announcement."""
        return max(0, self.max_position_count - self.record.before)


class ScaleUpTracker:
    """The scale-ups of one model, in order of their first announcement, with the replicas that arrived."""

    def __init__(self, records: Iterable[ScaleUpRecord], members: Iterable[InstanceRecord]) -> None:
        ordered = sorted(records, key=lambda each: (each.first_at, each.scaleup.scaleup_id))
        self.scaleups = [ExpectedReplicas(record) for record in ordered]
        self._first: dict[str, float] = {}  # first sighting of each replica
        self._indices: dict[str, set[int]] = {}  # data-parallel indices by rank key
        for record in sorted(members, key=lambda each: (each.since, each.report.instance_id)):
            self.add(record)

    def live(self, now: float) -> list[ExpectedReplicas]:
        """Return the scale-ups that have not expired."""
        return [scaleup for scaleup in self.scaleups if now < scaleup.record.expires_at]

    def missing(self, version: str, rank_key: str, now: float) -> int:
        """Return how many replicas that may have this version lack an instance of this rank."""
        live = [scaleup for scaleup in self.live(now) if scaleup.accepts_version(version)]
        indices = self._indices.get(rank_key, {0})
        return max(sum(scaleup.remaining((rank_key, index)) for scaleup in live) for index in indices)

    def is_expected(self, record: InstanceRecord, now: float) -> bool:
        """Return True if the instance, before its first fork request, is expected by a scale-up."""
        if record.report.holder is not None:
            return False
        since = self._first.get(replica_key(record.report), record.since)
        live = [
            scaleup
            for scaleup in self.live(now)
            if scaleup.record.first_at <= min(since, record.since) and scaleup.accepts_version(record.version)
        ]
        return any(scaleup.remaining(position_of(record.report)) for scaleup in live)

    def add(self, record: InstanceRecord) -> None:
        """Record an instance that is new, or that requests its first fork; a holder's image is no replica."""
        if record.report.holder is not None:
            return
        position, replica = position_of(record.report), replica_key(record.report)
        self._indices.setdefault(position[0], set()).add(position[1])
        since = self._first[replica] = min(record.since, self._first.get(replica, math.inf))
        if not record.plan_requested:
            return
        # All ranks of a replica count for the same scale-up.
        matching = [scaleup for scaleup in self.scaleups if replica in scaleup.replicas] or [
            scaleup
            for scaleup in self.scaleups
            if scaleup.record.first_at <= since
            and scaleup.remaining(position)
            and scaleup.accepts_version(record.version)
        ]
        if matching:
            matching[0].add(position, replica)


def position_of(report: InstanceReport) -> Position:
    """Return the position of an instance within its replica."""
    return report.rank.key, report.rank.dp


@dataclass
class _ReplicaShape:
    """The ranks of one role, for replicas of one version and size."""

    min_ranks: int
    """Minimum number of ranks; expert parallelism may add more."""
    seeds: dict[str, int] = field(default_factory=dict)
    """Number of seeds by rank key, for the known ranks."""
    image_bytes: int = 0
    members: int = 0

    @property
    def min_seeds(self) -> int:
        """Number of seeds of the rank that has the fewest."""
        return min(self.seeds.values()) if len(self.seeds) >= self.min_ranks else 0

    @property
    def score(self) -> tuple[int, int]:
        """A sort key: the shape with the greatest one is forked from."""
        return self.min_seeds, self.members


@dataclass(frozen=True)
class ScaleUpForecast:
    """Expected sources and size for the replicas of a scale-up."""

    seeds: int
    image_bytes: int
    reason: str

    @classmethod
    def of(cls, model: str, version: str | None, groups: Iterable[tuple[GroupIndex, InstanceRecord]]) -> Self:
        """Return the forecast for replicas of a version; without one, of the version with the most seeds.

        `groups` are the groups of the model, each with one of its members. If replicas of different sizes serve
        the version, the size with the most seeds counts.
        """
        shapes: dict[str, dict[tuple[str, int, int, int], _ReplicaShape]] = {}
        for group, member in groups:
            if version is not None and group.version != version:
                continue
            rank = member.report.rank
            shape_key = group.version, rank.tp_size, rank.pp_size, rank.ep_size
            of_role = shapes.setdefault(rank.role, {})
            shape = of_role.setdefault(shape_key, _ReplicaShape(rank.tp_size * rank.pp_size))
            shape.seeds[group.rank_key] = sum(
                source.complete and source.state != "draining" and not source.quarantine
                for source in group.sources.values()
            )
            shape.image_bytes += member.report.image_bytes
            shape.members += len(group.sources)
        best = [max(of_role.values(), key=lambda shape: shape.score) for of_role in shapes.values()]
        image_bytes = sum(shape.image_bytes for shape in best)
        return cls(min((shape.min_seeds for shape in best), default=0), image_bytes, _reason(model, version, best))


def _reason(model: str, version: str | None, best: Iterable[_ReplicaShape]) -> str:
    is_single_rank = "one replica reads storage for all, or each loads by its engine's loader"
    seed_counts = [count for shape in best for count in shape.seeds.values() if count]
    if not seed_counts:
        subject = f"version {short(version)} of {model}" if version else model
        return f"no instance has {subject}: {is_single_rank}"
    lacking = sorted(key for shape in best for key, count in shape.seeds.items() if not count)
    unknown = sum(max(0, shape.min_ranks - len(shape.seeds)) for shape in best)
    seeds = f"{min(seed_counts)} seed{'s' if min(seed_counts) > 1 else ''}"
    if not (lacking or unknown):
        return f"they fork from {seeds}"
    more = f" (and {len(lacking) + unknown - 1} more)" if len(lacking) + unknown > 1 else ""
    shape_name = f"rank {lacking[0]}{more}" if lacking else f"{unknown} of the ranks"
    return f"no instance has {shape_name}: {is_single_rank}; other ranks fork from {seeds}"


class ScaleUps:
    """All announced scale-ups, and the replicas that each of them still expects."""

    def __init__(self) -> None:
        self._records: dict[str, ScaleUpRecord] = {}
        self._by_host: dict[str, dict[str, None]] = {}  # ids by announced host
        self._models: dict[str, ScaleUpTracker] = {}

    def apply(self, records: Iterable[ScaleUpRecord], withdrawn: Iterable[str]) -> set[str]:
        """Insert or replace scale-ups and remove others; return the models to recount."""
        models: set[str] = set()
        for scaleup_id in withdrawn:
            models |= self._withdraw(scaleup_id)
        for record in records:
            models |= self._withdraw(record.scaleup.scaleup_id) | {record.scaleup.model}
            self._records[record.scaleup.scaleup_id] = record
            for host in record.scaleup.hosts:
                self._by_host.setdefault(host, {})[record.scaleup.scaleup_id] = None
        return models

    def recount(self, model: str, members: Iterable[InstanceRecord]) -> None:
        """Count the arrived replicas of a model again, whose instances are `members`."""
        records = [record for record in self._records.values() if record.scaleup.model == model]
        self._models.pop(model, None)
        if records:
            self._models[model] = ScaleUpTracker(records, members)

    def add(self, record: InstanceRecord) -> None:
        """Record an instance that is new, or that requests its first fork."""
        model = self._models.get(record.report.model)
        if model is not None:
            model.add(record)

    def record(self, scaleup_id: str) -> ScaleUpRecord | None:
        """Return the scale-up's record, if it is known; it may have expired."""
        return self._records.get(scaleup_id)

    def records(self) -> list[ScaleUpRecord]:
        """Return all records, in the order they were last announced."""
        return list(self._records.values())

    def find(self, scaleup_id: str, now: float) -> ExpectedReplicas | None:
        """Return a scale-up that has not expired, with its arrived replicas."""
        record = self._records.get(scaleup_id)
        if record is None or now >= record.expires_at:
            return None
        tracked = self._models[record.scaleup.model].scaleups
        return next(each for each in tracked if each.record.scaleup.scaleup_id == scaleup_id)

    def live(self, now: float) -> list[ExpectedReplicas]:
        """Return the scale-ups that have not expired, ordered by id."""
        found = [tracked for model in self._models.values() for tracked in model.live(now)]
        return sorted(found, key=lambda tracked: tracked.record.scaleup.scaleup_id)

    def announced_for(self, host: str, now: float) -> list[ScaleUp]:
        """Return the scale-ups whose replicas will start on a host, in order of their first announcement."""
        records = [self._records[scaleup_id] for scaleup_id in self._by_host.get(host, ())]
        live = [record for record in records if now < record.expires_at]
        return [record.scaleup for record in sorted(live, key=lambda each: (each.first_at, each.scaleup.scaleup_id))]

    def expired(self, now: float) -> tuple[str, ...]:
        """Return the ids of expired scale-ups."""
        return tuple(name for name, record in self._records.items() if now >= record.expires_at)

    def expected(self, group: GroupKey, now: float) -> int:
        """Return the number of announced replicas without a fork request in this group."""
        model = self._models.get(group.model)
        return 0 if model is None else model.missing(group.version, group.rank_key, now)

    def is_expected(self, record: InstanceRecord, now: float) -> bool:
        """Return True if the instance, before its first fork request, is expected by a scale-up."""
        model = self._models.get(record.report.model)
        return model is not None and model.is_expected(record, now)

    def ttl_seconds(self, model: str, now: float) -> float:
        """Return the seconds until the next of the model's scale-ups expires; infinite if there is none."""
        known = self._models.get(model)
        return min(
            (tracked.record.expires_at - now for tracked in (known.live(now) if known else ())), default=math.inf
        )

    def _withdraw(self, scaleup_id: str) -> set[str]:
        """Remove a scale-up; return its model, if it was known."""
        old = self._records.pop(scaleup_id, None)
        if old is None:
            return set()
        for host in set(old.scaleup.hosts):
            del self._by_host[host][scaleup_id]
            if not self._by_host[host]:
                del self._by_host[host]
        return {old.scaleup.model}


def scaleup_info(record: ScaleUpRecord, arrived: int, now: float, forecast: ScaleUpForecast) -> ScaleUpInfo:
    """Return a scale-up as listed by the API."""
    return ScaleUpInfo(
        scaleup=record.scaleup,
        arrived_count=arrived,
        expires_in_s=max(0.0, record.expires_at - now),
        seeds=forecast.seeds,
        image_bytes=forecast.image_bytes,
        reason=forecast.reason if record.scaleup.replicas else "no replicas are expected any more",
    )
