"""The seam between the registry and where its records are kept.

Calls return at once and are made from one thread, the event loop's. A store that shares records
between planners keeps a local copy to answer from, and carries changes to and fro behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from planner.store.records import ForkRecord, GroupKey, InstanceRecord


class Store(Protocol):
    """Records by id, and by group."""

    def instance(self, instance_id: str) -> InstanceRecord | None:
        """The instance's record, if it is known."""

    def put_instance(self, record: InstanceRecord) -> None:
        """Add the record, or replace the one with its id."""

    def delete_instance(self, instance_id: str) -> None:
        """Delete the record; one that is not there is no error."""

    def instances(self) -> Iterable[InstanceRecord]:
        """All of them, as they were at the call, in the order they were first put."""

    def instances_in(self, group: GroupKey) -> Iterable[InstanceRecord]:
        """Those of one group."""

    def groups(self) -> Iterable[GroupKey]:
        """The groups that hold at least one instance."""

    def fork(self, fork_id: str) -> ForkRecord | None:
        """The fork's record, if it is known."""

    def put_fork(self, record: ForkRecord) -> None:
        """Add the record, or replace the one with its id; too many ended ones drop the oldest."""

    def forks(self) -> Iterable[ForkRecord]:
        """All of them, as they were at the call, in the order they were first put."""

    def live_forks(self) -> Iterable[ForkRecord]:
        """Those under way, as they were at the call."""

    def live_forks_in(self, group: GroupKey) -> Iterable[ForkRecord]:
        """Those under way in one group."""

    def live_fork_of(self, instance_id: str) -> ForkRecord | None:
        """The fork under way whose target is the instance, if there is one."""

    def ready(self) -> bool:
        """Whether records can be read and written now."""
