"""Store interface: keeps the planner's records beyond one call, process or replica.

Every replica keeps the complete state in memory (`PlannerStore.state`), so that planning needs no network. A
change is sent to the store with the version of the group that it is based on: the store applies it
atomically, or, if another replica changed the group meanwhile, rejects it with `CommitConflict` once `state`
is up to date. So two replicas never assign one slot to two readers, nor elect two storage readers.
"""

from __future__ import annotations

from typing import Protocol

from planner.core.records import GroupKey, StoreChange
from planner.core.state import PlannerState


class CommitConflict(Exception):
    """Another replica changed the group since it was read; `state` is up to date: decide again."""


class StoreUnavailable(Exception):
    """The store does not answer: most likely nothing was changed. The message names what to check."""


class PlannerStore(Protocol):
    """Keeps `state`, alone or shared with other replicas."""

    state: PlannerState

    async def start(self) -> None:
        """Connect and load the stored records; raises StoreUnavailable, and may keep retrying until `stop`."""

    async def stop(self) -> None:
        """Close connections and tasks."""

    async def commit(self, change: StoreChange) -> None:
        """Apply the change to `state` and to the store, atomically. Raises CommitConflict or
        StoreUnavailable.
        """

    def version(self, group: GroupKey) -> int:
        """Return the version of the group's forks in `state`, for `StoreChange.version`."""

    def now(self) -> float:
        """Return seconds on a monotonic clock that all replicas share; used for all times in records."""

    @property
    def ready(self) -> bool:
        """True if records can currently be read and written."""
