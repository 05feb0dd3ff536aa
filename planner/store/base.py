"""The store seam: how the planner's records outlive one call, one process, or one replica.

Every replica keeps the whole state in memory (`PlannerStore.state`), so that a plan reads no network. A change
is offered to the store with the version of the group that it was made from: the store takes it whole,
or, where another replica changed the group in the meantime, refuses it with `CommitConflict` once `state` is
up to date. Two replicas so never give one slot to two readers, nor elect two readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from planner.state import PlannerState
from planner.store.records import ForkRecord, GroupKey, InstanceRecord, ScaleUpRecord


class CommitConflict(Exception):
    """Another replica changed the group since it was looked at; `state` is up to date: decide again."""


class StoreUnavailable(Exception):
    """The store does not answer: most likely nothing was changed. Its text says what to look at."""


@dataclass(frozen=True)
class StoreChange:
    """Records to keep, and instances to forget, in one step."""

    instances: tuple[InstanceRecord, ...] = ()
    forks: tuple[ForkRecord, ...] = ()
    removed: tuple[str, ...] = ()
    """Ids of instances to forget."""
    scaleups: tuple[ScaleUpRecord, ...] = ()
    withdrawn: tuple[str, ...] = ()
    """Ids of scale-ups to forget."""
    group: GroupKey | None = None
    """Where set, the change holds only if nobody changed the forks of this group since `version`."""
    version: int = 0


class PlannerStore(Protocol):
    """Keeps `state`, alone or with other replicas."""

    state: PlannerState

    async def start(self) -> None:
        """Connect and load what there is; raises StoreUnavailable, and may go on trying until `stop`."""

    async def stop(self) -> None:
        """Let go of connections and tasks."""

    async def commit(self, change: StoreChange) -> None:
        """Apply the change to `state`, and to the store, whole. Raises Conflict or StoreUnavailable."""

    def version(self, group: GroupKey) -> int:
        """The version of the group's forks in `state`, for `StoreChange.version`."""

    def now(self) -> float:
        """Seconds on a clock that never goes back and that all replicas share; for all times in records."""

    @property
    def ready(self) -> bool:
        """Whether records can be read and written now."""
