"""Store interface: keeps the planner's records beyond one call, process or replica.

Every replica keeps the complete state in memory (`PlannerStore.state`), so that planning needs no network. A
change is sent to the store with the version of the group that it is based on: the store applies it
atomically, or, if another replica changed the group meanwhile, rejects it with `CommitConflict` once `state`
is up to date. So two replicas never assign one slot to two readers, nor elect two storage readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from planner.state import PlannerState
from planner.store.records import ForkRecord, GroupKey, InstanceRecord, ScaleUpRecord


class CommitConflict(Exception):
    """Another replica changed the group since it was read; `state` is up to date: decide again."""


class StoreUnavailable(Exception):
    """The store does not answer: most likely nothing was changed. The message names what to check."""


@dataclass(frozen=True)
class StoreChange:
    """Records to write, and ids to remove, atomically."""

    instances: tuple[InstanceRecord, ...] = ()
    forks: tuple[ForkRecord, ...] = ()
    removed: tuple[str, ...] = ()
    """Ids of instances to remove."""
    scaleups: tuple[ScaleUpRecord, ...] = ()
    withdrawn: tuple[str, ...] = ()
    """Ids of scale-ups to remove."""
    group: GroupKey | None = None
    """If set, the change is applied only if the forks of this group have not changed since `version`."""
    version: int = 0


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
