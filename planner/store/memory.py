"""Store in this process's memory. A restart loses it: one heartbeat of each instance restores it."""

from __future__ import annotations

from planner.clock import Clock
from planner.core.records import GroupKey, StoreChange
from planner.core.state import PlannerState
from planner.store.base import CommitConflict


class MemoryStore:
    """Store of a single planner."""

    def __init__(self, clock: Clock, *, max_finished_forks: int) -> None:
        self.state = PlannerState(max_finished_forks=max_finished_forks)
        self._clock = clock
        self._changes = 0
        self._versions: dict[GroupKey, int] = {}

    async def start(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def stop(self) -> None:
        """Do nothing: there is nothing to close."""

    async def commit(self, change: StoreChange) -> None:
        """Apply the change; raises CommitConflict if it is based on an older version of the group."""
        if change.group is not None:
            if change.version != self.version(change.group):
                raise CommitConflict
            self._changes += 1
            self._versions[change.group] = self._changes
        self.state.apply(change)
        if change.removed:
            # Numbers are never reused, so a removed group may start again at 0.
            live_groups = {group.key for group in self.state.groups()}
            self._versions = {key: version for key, version in self._versions.items() if key in live_groups}

    def version(self, group: GroupKey) -> int:
        """Return the number of the last change of the group's forks; 0 for none."""
        return self._versions.get(group, 0)

    def now(self) -> float:
        """Return this machine's monotonic clock."""
        return self._clock.monotonic()

    @property
    def ready(self) -> bool:
        """True: memory is always available."""
        return True
