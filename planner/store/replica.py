"""In-memory replica of the contents of Redis: the records, and the last change read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from planner.clock import Clock
from planner.core.records import GroupKey, StoreChange
from planner.core.state import PlannerState
from planner.store.messages import (
    FORKS,
    HOLDER_ADAPTER,
    INSTANCES,
    SCALEUP_ADAPTER,
    Codec,
    LogEntry,
    Patch,
    Record,
    ReplicaOutdated,
    StoreSnapshot,
    group_from,
)

MAX_EMPTIED: Final = 256
"""Maximum number of groups removed per change; the next change that removes an instance removes more."""


class Replica:
    """Applies numbered changes to a `PlannerState`, each once and in order, and keeps the shared clock.

    The shared clock is that of the furthest replica. A replica's own clock stops when Redis has not responded
    for `max_staleness_s`: to a replica that was paused or cut off, every instance seems to be silent, and
    while Redis was unavailable no heartbeat could be received.
    """

    def __init__(self, clock: Clock, *, max_finished_forks: int, max_staleness_s: float) -> None:
        self.state = PlannerState(max_finished_forks=max_finished_forks)
        self.epoch = ""
        self.applied = 0
        """Number of the last change in `state`."""
        self._clock = clock
        self._max_staleness_s = max_staleness_s
        self._synced_at = clock.monotonic()
        self._clock_offset = 0.0  # shared clock minus this machine's clock, in seconds
        self._versions: dict[GroupKey, int] = {}
        self._floor = 0

    def fill(self, contents: StoreSnapshot) -> None:
        """Replace everything. Records are inserted in the order of their last report."""
        if not self.epoch:
            self._clock_offset = contents.time - self._clock.monotonic()
        self.epoch, self.applied = contents.epoch, contents.number
        self._versions, self._floor = dict(contents.versions), contents.floor
        ended = {name: None for name in contents.ended if name in contents.forks}
        live = [fork for name, fork in contents.forks.items() if name not in ended]
        self.state.clear()
        # Forks first: otherwise a reader that an instance names would count as unplanned.
        live.sort(key=lambda fork: fork.seen_at)
        self.state.apply(StoreChange(forks=(*(contents.forks[name] for name in ended), *live)))
        instances = sorted(contents.instances.values(), key=lambda instance: instance.seen_at)
        self.state.apply(
            StoreChange(
                instances=tuple(instances),
                scaleups=tuple(contents.scaleups.values()),
                holders=tuple(contents.holders.values()),
            )
        )
        self.mark_synced(contents.time)
        self.state.notify_reloaded()

    def apply(self, entry: LogEntry) -> None:
        """Apply the change, unless already applied; raises ReplicaOutdated if earlier ones are missing."""
        if entry.number <= self.applied:
            return
        if entry.number != self.applied + 1:
            raise ReplicaOutdated(f"change {entry.number} arrived after {self.applied}")
        body = entry.body
        try:
            instances = tuple(_apply_patches(INSTANCES, body.instances, self.state.instance))
            forks = tuple(_apply_patches(FORKS, body.forks, self.state.fork))
            scaleups = tuple(SCALEUP_ADAPTER.validate_json(text) for _, text in body.scaleups)
            holders = tuple(HOLDER_ADAPTER.validate_json(text) for _, text in body.holders)
        except ValueError as error:
            first_line = str(error).partition("\n")[0]
            raise ReplicaOutdated(f"change {entry.number} does not match the local records: {first_line}") from None
        # Clock first: later events here must not appear to precede the change.
        self._clock_offset += max(0.0, entry.time - self.now())
        self.state.apply(
            StoreChange(instances, forks, body.removed, scaleups, body.withdrawn, holders, body.removed_holders)
        )
        if body.group:
            self._versions[group_from(body.group)] = entry.number
        for emptied in body.emptied:
            self._versions.pop(group_from(emptied), None)
            self._floor = entry.number
        self.applied = entry.number

    def mark_synced(self, at: float = 0.0) -> None:
        """Record that Redis was read completely; `at`: furthest clock of any replica."""
        now = max(self.now(), at)
        self._synced_at = self._clock.monotonic()
        self._clock_offset = now - self._synced_at

    def version(self, group: GroupKey) -> int:
        """Return the number of the last change of the group's forks; for a group without one, the floor.

        So no version is used twice: a plan from before a group was removed is rejected after it.
        """
        return self._versions.get(group, self._floor)

    def groups_emptied_by(self, removed: Iterable[str]) -> list[GroupKey]:
        """Return the groups with a version that have no members other than the instances `removed`."""
        leaving, remaining_groups = set(removed), set[GroupKey]()
        for group in self.state.groups():
            if not leaving.issuperset(group.sources):
                remaining_groups.add(group.key)
        return [group for group in self._versions if group not in remaining_groups][:MAX_EMPTIED]

    def now(self) -> float:
        """Return the shared clock in seconds; it started at the unix time of Redis."""
        return min(self._clock.monotonic(), self._synced_at + self._max_staleness_s) + self._clock_offset


def _apply_patches(
    codec: Codec[Record], patches: Iterable[tuple[str, Patch]], known: Callable[[str], Record | None]
) -> Iterator[Record]:
    for record_id, patch in patches:
        base = known(record_id)
        # Another replica may keep more finished forks than this one.
        if base is not None or codec.head in patch:
            yield codec.apply(base, patch)
