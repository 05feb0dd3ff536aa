"""Records in this process's memory. They end with it: one heartbeat of each instance restores them."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

from planner.store.records import ForkRecord, GroupKey, InstanceRecord

Record = TypeVar("Record", InstanceRecord, ForkRecord)


class MemoryStore:
    """A Store in dictionaries. Keeps the last `keep_forks` forks that ended."""

    def __init__(self, *, keep_forks: int) -> None:
        self._keep_forks = keep_forks
        self._instances: dict[str, InstanceRecord] = {}
        self._groups: defaultdict[GroupKey, dict[str, InstanceRecord]] = defaultdict(dict)
        self._forks: dict[str, ForkRecord] = {}
        self._live: dict[str, ForkRecord] = {}
        self._live_groups: defaultdict[GroupKey, dict[str, ForkRecord]] = defaultdict(dict)
        self._live_targets: dict[str, str] = {}
        self._ended: dict[str, None] = {}  # in order of their end

    def instance(self, instance_id: str) -> InstanceRecord | None:
        """The instance's record, if it is known."""
        return self._instances.get(instance_id)

    def put_instance(self, record: InstanceRecord) -> None:
        """Add the record, or replace the one with its id."""
        instance_id = record.report.instance_id
        old = self._instances.get(instance_id)
        if old is not None and old.group != record.group:
            _discard(self._groups, old.group, instance_id)
        self._instances[instance_id] = record
        self._groups[record.group][instance_id] = record

    def delete_instance(self, instance_id: str) -> None:
        """Delete the record; one that is not there is no error."""
        old = self._instances.pop(instance_id, None)
        if old is not None:
            _discard(self._groups, old.group, instance_id)

    def instances(self) -> list[InstanceRecord]:
        """All of them, in the order they were first put."""
        return list(self._instances.values())

    def instances_in(self, group: GroupKey) -> list[InstanceRecord]:
        """Those of one group."""
        return list(self._groups.get(group, {}).values())

    def groups(self) -> list[GroupKey]:
        """The groups that hold at least one instance."""
        return list(self._groups)

    def fork(self, fork_id: str) -> ForkRecord | None:
        """The fork's record, if it is known."""
        return self._forks.get(fork_id)

    def put_fork(self, record: ForkRecord) -> None:
        """Add the record, or replace the one with its id; too many ended ones drop the oldest."""
        fork_id = record.fork_id
        self._forks[fork_id] = record
        if record.live:
            self._ended.pop(fork_id, None)
            self._live[fork_id] = record
            self._live_groups[record.group][fork_id] = record
            self._live_targets[record.instance_id] = fork_id
            return
        if self._live.pop(fork_id, None) is not None:
            _discard(self._live_groups, record.group, fork_id)
            if self._live_targets.get(record.instance_id) == fork_id:
                del self._live_targets[record.instance_id]
        self._ended[fork_id] = None
        while len(self._ended) > self._keep_forks:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._forks[oldest]

    def forks(self) -> list[ForkRecord]:
        """All of them, in the order they were first put."""
        return list(self._forks.values())

    def live_forks(self) -> list[ForkRecord]:
        """Those under way."""
        return list(self._live.values())

    def live_forks_in(self, group: GroupKey) -> list[ForkRecord]:
        """Those under way in one group."""
        return list(self._live_groups.get(group, {}).values())

    def live_fork_of(self, instance_id: str) -> ForkRecord | None:
        """The fork under way whose target is the instance, if there is one."""
        fork_id = self._live_targets.get(instance_id)
        return None if fork_id is None else self._live[fork_id]

    def ready(self) -> bool:
        """Memory is always at hand."""
        return True


def _discard(groups: defaultdict[GroupKey, dict[str, Record]], group: GroupKey, identifier: str) -> None:
    members = groups[group]
    members.pop(identifier, None)
    if not members:
        del groups[group]
