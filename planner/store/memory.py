"""Records in this process's memory. They end with it: one heartbeat of each instance restores them."""

from __future__ import annotations

from planner.leases import Clock
from planner.state import PlannerState
from planner.store.base import CommitConflict, StoreChange
from planner.store.records import GroupKey


class MemoryStore:
    """The store of a planner that runs alone."""

    def __init__(self, clock: Clock, *, keep_forks: int) -> None:
        self.state = PlannerState(keep_forks=keep_forks)
        self._clock = clock
        self._changes = 0
        self._versions: dict[GroupKey, int] = {}

    async def start(self) -> None:
        """There is nothing to connect to."""

    async def stop(self) -> None:
        """There is nothing to let go of."""

    async def commit(self, change: StoreChange) -> None:
        """Apply the change; raises Conflict where it was made from an older version of the group."""
        if change.group is not None:
            if change.version != self.version(change.group):
                raise CommitConflict
            self._changes += 1
            self._versions[change.group] = self._changes
        self.state.apply(change.instances, change.forks, change.removed, change.scaleups, change.withdrawn)
        if change.removed:
            # Numbers never come again, so a group that is gone may begin anew.
            live_groups = {group.key for group in self.state.groups()}
            self._versions = {key: version for key, version in self._versions.items() if key in live_groups}

    def version(self, group: GroupKey) -> int:
        """The number of the change that the group's forks were last in; 0 for none."""
        return self._versions.get(group, 0)

    def now(self) -> float:
        """This machine's monotonic clock."""
        return self._clock.monotonic()

    @property
    def ready(self) -> bool:
        """Memory is always at hand."""
        return True
