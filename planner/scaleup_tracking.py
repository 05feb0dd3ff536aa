"""Who has come of one model's scale-ups.

The planner is not told which instance belongs to which replica of a model, nor how many ranks one has. It
counts apart for each group and data-parallel index: there, each replica has one instance, whether its ranks
run in one Pod or in several. An instance that starts again in the same place counts once. That place is what
its id says before its rank (``REPLICA-RANK-…``, with RFORK_REPLICA set, as in Pods); else its Pod; else it is
its own. Where a model's replicas differ in their data-parallel size, those with fewer wait the whole time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from planner.store.records import InstanceRecord, ScaleUpRecord
from rfork.schema import InstanceReport

Position = tuple[str, int]
"""Rank key and data-parallel index: one instance of each replica."""


def replica_key(report: InstanceReport) -> str:
    """What an instance that starts again has in common with the one that it was."""
    replica, found, _ = report.instance_id.rpartition(f"-{report.rank.key}-")
    if found and replica:
        return replica
    return report.placement.pod or report.instance_id


class ExpectedReplicas:
    """A scale-up, and the places of those that came of it."""

    def __init__(self, record: ScaleUpRecord) -> None:
        self.record = record
        self.replicas: set[str] = set()
        self._arrived: dict[Position, set[str]] = {}

    def accepts_version(self, version: str) -> bool:
        """Return whether replicas of this version, if it is settled, may be part of the scale-up."""
        return not version or self.record.scaleup.version in (None, version)

    def remaining(self, position: Position) -> int:
        """Replicas of which this instance has not come."""
        return max(0, self.record.expected - len(self._arrived.get(position, ())))

    def add(self, position: Position, replica: str) -> None:
        """An instance of the replica in this place came."""
        self.replicas.add(replica)
        self._arrived.setdefault(position, set()).add(replica)

    @property
    def max_position_count(self) -> int:
        """Replicas of which any rank came: of several Pods that make one, no two are in one position."""
        max_arrived = max((len(arrived_replicas) for arrived_replicas in self._arrived.values()), default=0)
        return min(max_arrived, self.record.expected)

    @property
    def arrived_since(self) -> int:
        """Those of them that came after it was last announced."""
        return max(0, self.max_position_count - self.record.before)


class ScaleUpTracker:
    """The scale-ups of one model, the one that was announced first first, and who came of them."""

    def __init__(self, records: Iterable[ScaleUpRecord], members: Iterable[InstanceRecord]) -> None:
        ordered = sorted(records, key=lambda each: (each.first_at, each.scaleup.scaleup_id))
        self.scaleups = [ExpectedReplicas(record) for record in ordered]
        self._first: dict[str, float] = {}  # when anything of a place was first heard of
        self._indices: dict[str, set[int]] = {}  # data-parallel indices by rank key
        for record in sorted(members, key=lambda each: (each.since, each.report.instance_id)):
            self.add(record)

    def live(self, now: float) -> list[ExpectedReplicas]:
        """Those that have not expired."""
        return [scaleup for scaleup in self.scaleups if now < scaleup.record.expires_at]

    def missing(self, version: str, rank_key: str, now: float) -> int:
        """Return how many replicas that may have this version have no instance of this rank yet."""
        live = [scaleup for scaleup in self.live(now) if scaleup.accepts_version(version)]
        indices = self._indices.get(rank_key, {0})
        return max(sum(scaleup.remaining((rank_key, index)) for scaleup in live) for index in indices)

    def is_expected(self, record: InstanceRecord, now: float) -> bool:
        """Whether the instance, about to ask for the first time, is one of those expected."""
        since = self._first.get(replica_key(record.report), record.since)
        live = [
            scaleup
            for scaleup in self.live(now)
            if scaleup.record.first_at <= min(since, record.since) and scaleup.accepts_version(record.version)
        ]
        return any(scaleup.remaining(position_of(record.report)) for scaleup in live)

    def add(self, record: InstanceRecord) -> None:
        """An instance is new, or asks for its first fork."""
        position, replica = position_of(record.report), replica_key(record.report)
        self._indices.setdefault(position[0], set()).add(position[1])
        since = self._first[replica] = min(record.since, self._first.get(replica, math.inf))
        if not record.asked_for_plan:
            return
        # Of one replica all ranks count for one scale-up.
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
    """Which of its replica's instances it is."""
    return report.rank.key, report.rank.dp
