"""What one replica knows of what Redis holds: the records, and how far it has read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from planner.leases import Clock
from planner.state import PlannerState
from planner.store.codec import FORKS, INSTANCES, Codec, Patch, Record
from planner.store.messages import SCALEUP_ADAPTER, LogEntry, ReplicaBehind, StoreSnapshot, group_from
from planner.store.records import GroupKey

MAX_EMPTIED: Final = 256
"""Groups that one change forgets; the next one that has an instance leave forgets more."""


class Replica:
    """Applies numbered changes to a `State`, each once and in order, and keeps the shared clock.

    That clock is as far as the furthest replica's. A replica's own stands still when it has heard nothing
    from Redis for `max_staleness_s`: to one that was paused, or cut off, everybody seems to be silent, and where
    Redis was away nobody could be heard.
    """

    def __init__(self, clock: Clock, *, keep_forks: int, max_staleness_s: float) -> None:
        self.state = PlannerState(keep_forks=keep_forks)
        self.epoch = ""
        self.applied = 0
        """Number of the last change that is in `state`."""
        self._clock = clock
        self._max_staleness_s = max_staleness_s
        self._synced_at = clock.monotonic()
        self._clock_offset = 0.0  # seconds that the shared clock is ahead of this machine's
        self._versions: dict[GroupKey, int] = {}
        self._floor = 0

    def fill(self, contents: StoreSnapshot) -> None:
        """Replace everything. Records are put in the order in which they were last heard of."""
        if not self.epoch:
            self._clock_offset = contents.time - self._clock.monotonic()
        self.epoch, self.applied = contents.epoch, contents.number
        self._versions, self._floor = dict(contents.versions), contents.floor
        ended = {name: None for name in contents.ended if name in contents.forks}
        live = [fork for name, fork in contents.forks.items() if name not in ended]
        self.state.clear()
        # Forks first: a reader that an instance names is then no stranger.
        self.state.apply(forks=[contents.forks[name] for name in ended])
        self.state.apply(forks=sorted(live, key=lambda fork: fork.seen_at))
        self.state.apply(sorted(contents.instances.values(), key=lambda instance: instance.seen_at))
        self.state.apply(scaleups=contents.scaleups.values())
        self.is_synced(contents.time)
        self.state.notify_reloaded()

    def apply(self, entry: LogEntry) -> None:
        """Take the change, unless that was done before; raises Behind where those before it are missing."""
        if entry.number <= self.applied:
            return
        if entry.number != self.applied + 1:
            raise ReplicaBehind(f"change {entry.number} came after {self.applied}")
        body = entry.body
        try:
            instances = list(_apply_patches(INSTANCES, body.instances, self.state.instance))
            forks = list(_apply_patches(FORKS, body.forks, self.state.fork))
            scaleups = [SCALEUP_ADAPTER.validate_json(text) for _, text in body.scaleups]
        except ValueError as error:
            first_line = str(error).partition("\n")[0]
            raise ReplicaBehind(f"change {entry.number} does not fit what is known: {first_line}") from None
        # The clock first: what comes here after the change must not seem to have come before it.
        self._clock_offset += max(0.0, entry.time - self.now())
        self.state.apply(instances, forks, body.removed, scaleups, body.withdrawn)
        if body.group:
            self._versions[group_from(body.group)] = entry.number
        for emptied in body.emptied:
            self._versions.pop(group_from(emptied), None)
            self._floor = entry.number
        self.applied = entry.number

    def is_synced(self, at: float = 0.0) -> None:
        """All that Redis held a moment ago was read; `at`: the furthest that any replica's clock had come."""
        now = max(self.now(), at)
        self._synced_at = self._clock.monotonic()
        self._clock_offset = now - self._synced_at

    def version(self, group: GroupKey) -> int:
        """Number of the last change of the group's forks; of a group without one, of the last forgetting.

        So no version comes twice: a plan from before a group was forgotten is refused after it.
        """
        return self._versions.get(group, self._floor)

    def groups_emptied_by(self, removed: Iterable[str]) -> list[GroupKey]:
        """Groups whose version is kept although, without the instances `removed`, nobody is in them."""
        leaving, remaining_groups = set(removed), set[GroupKey]()
        for group in self.state.groups():
            if not leaving.issuperset(group.sources):
                remaining_groups.add(group.key)
        return [group for group in self._versions if group not in remaining_groups][:MAX_EMPTIED]

    def now(self) -> float:
        """The shared clock, in seconds; it began as the unix time of Redis."""
        return min(self._clock.monotonic(), self._synced_at + self._max_staleness_s) + self._clock_offset


def _apply_patches(
    codec: Codec[Record], patches: Iterable[tuple[str, Patch]], known: Callable[[str], Record | None]
) -> Iterator[Record]:
    for record_id, patch in patches:
        base = known(record_id)
        # Another replica keeps more of the forks that ended than this one does.
        if base is not None or codec.head in patch:
            yield codec.apply(base, patch)
