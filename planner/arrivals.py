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
from rfork.wire import InstanceReport

Position = tuple[str, int]
"""Rank key and data-parallel index: one instance of each replica."""


def place_of(report: InstanceReport) -> str:
    """What an instance that starts again has in common with the one that it was."""
    replica, found, _ = report.instance_id.rpartition(f"-{report.rank.key}-")
    if found and replica:
        return replica
    return report.placement.pod or report.instance_id


class Expected:
    """A scale-up, and the places of those that came of it."""

    def __init__(self, record: ScaleUpRecord) -> None:
        self.record = record
        self.places: set[str] = set()
        self._came: dict[Position, set[str]] = {}

    def fits(self, version: str) -> bool:
        """Return whether replicas of this version, if it is settled, may be part of the scale-up."""
        return not version or self.record.scaleup.version in (None, version)

    def left(self, position: Position) -> int:
        """Replicas of which this instance has not come."""
        return max(0, self.record.expected - len(self._came.get(position, ())))

    def add(self, position: Position, place: str) -> None:
        """An instance of the replica in this place came."""
        self.places.add(place)
        self._came.setdefault(position, set()).add(place)

    @property
    def came_most(self) -> int:
        """Replicas of which any rank came: of several Pods that make one, no two are in one position."""
        most = max((len(places) for places in self._came.values()), default=0)
        return min(most, self.record.expected)

    @property
    def came_since(self) -> int:
        """Those of them that came after it was last announced."""
        return max(0, self.came_most - self.record.before)


class Arrivals:
    """The scale-ups of one model, the one that was announced first first, and who came of them."""

    def __init__(self, records: Iterable[ScaleUpRecord], members: Iterable[InstanceRecord]) -> None:
        ordered = sorted(records, key=lambda each: (each.first_at, each.scaleup.scaleup_id))
        self.scaleups = [Expected(record) for record in ordered]
        self._first: dict[str, float] = {}  # when anything of a place was first heard of
        self._indices: dict[str, set[int]] = {}  # data-parallel indices by rank key
        for record in sorted(members, key=lambda each: (each.since, each.report.instance_id)):
            self.add(record)

    def live(self, now: float) -> list[Expected]:
        """Those that have not expired."""
        return [one for one in self.scaleups if now < one.record.expires_at]

    def missing(self, version: str, rank_key: str, now: float) -> int:
        """Return how many replicas that may have this version have no instance of this rank yet."""
        live = [one for one in self.live(now) if one.fits(version)]
        indices = self._indices.get(rank_key, {0})
        return max(sum(one.left((rank_key, index)) for one in live) for index in indices)

    def awaits(self, record: InstanceRecord, now: float) -> bool:
        """Whether the instance, about to ask for the first time, is one of those expected."""
        since = self._first.get(place_of(record.report), record.since)
        live = [
            one
            for one in self.live(now)
            if one.record.first_at <= min(since, record.since) and one.fits(record.version)
        ]
        return any(one.left(position_of(record.report)) for one in live)

    def add(self, record: InstanceRecord) -> None:
        """An instance is new, or asks for its first fork."""
        position, place = position_of(record.report), place_of(record.report)
        self._indices.setdefault(position[0], set()).add(position[1])
        since = self._first[place] = min(record.since, self._first.get(place, math.inf))
        if not record.asked:
            return
        # Of one replica all ranks count for one scale-up.
        fitting = [one for one in self.scaleups if place in one.places] or [
            one
            for one in self.scaleups
            if one.record.first_at <= since and one.left(position) and one.fits(record.version)
        ]
        if fitting:
            fitting[0].add(position, place)


def position_of(report: InstanceReport) -> Position:
    """Which of its replica's instances it is."""
    return report.rank.key, report.rank.dp
