"""Tracks which replicas of one model's scale-ups have arrived.

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

from planner.store.records import InstanceRecord, ScaleUpRecord
from rfork.schema import InstanceReport

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
        since = self._first.get(replica_key(record.report), record.since)
        live = [
            scaleup
            for scaleup in self.live(now)
            if scaleup.record.first_at <= min(since, record.since) and scaleup.accepts_version(record.version)
        ]
        return any(scaleup.remaining(position_of(record.report)) for scaleup in live)

    def add(self, record: InstanceRecord) -> None:
        """Record an instance that is new, or that requests its first fork."""
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
