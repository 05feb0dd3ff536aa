"""Records in this process's memory. They end with it: one heartbeat of each instance restores them."""

from __future__ import annotations

from collections import Counter

from planner.leases import Clock
from planner.state import State
from planner.store.base import Change, Conflict
from planner.store.records import GroupKey


class MemoryStore:
    """The store of a planner that runs alone."""

    def __init__(self, clock: Clock, *, keep_forks: int) -> None:
        self.state = State(keep_forks=keep_forks)
        self._clock = clock
        self._versions: Counter[GroupKey] = Counter()

    async def start(self) -> None:
        """There is nothing to connect to."""

    async def stop(self) -> None:
        """There is nothing to let go of."""

    async def commit(self, change: Change) -> None:
        """Apply the change; raises Conflict where it was made from an older version of the group."""
        if change.group is not None:
            if change.version != self._versions[change.group]:
                raise Conflict
            self._versions[change.group] += 1
        self.state.apply(change.instances, change.forks, change.gone)

    def version(self, group: GroupKey) -> int:
        """How often the group's forks were changed."""
        return self._versions[group]

    def now(self) -> float:
        """This machine's monotonic clock."""
        return self._clock.monotonic()

    @property
    def ready(self) -> bool:
        """Memory is always at hand."""
        return True
