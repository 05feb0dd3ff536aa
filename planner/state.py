"""Records of one planner replica, by id, and each group's index for the policy.

In memory and without a clock: a store decides which changes are applied, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final, Protocol

from planner.group_history import GroupHistory, GroupHistoryCache
from planner.group_index import GroupIndex
from planner.sorted_ids import SortedIds
from planner.store.records import ForkRecord, GroupKey, InstanceRecord, RouteRecord, ScaleUpRecord
from rfork import weights_version
from rfork.schema import ForkResult, StorageAssignment

ForkListener = Callable[[ForkRecord], None]
ROLES: Final = ("-main-", "-speculative-")
"""Separators after a replica's name in the ids of its instances (see `rfork.schema.Rank`), sorted."""


class StateListener(Protocol):
    """Notified of changes that scale-ups depend on, after `PlannerState` has applied them."""

    def on_instance(self, record: InstanceRecord) -> None:
        """Handle an instance that is new, or that requests its first fork."""

    def on_scaleups(self, models: Iterable[str]) -> None:
        """Handle changed scale-ups of these models."""

    def on_reload(self) -> None:
        """Handle a reload: everything may have changed."""


MAX_FINISHED_FORKS: Final = 1000
"""Finished forks that the planner keeps for its lists."""


class PlannerState:
    """All records. Keeps the last `max_finished_forks` finished forks."""

    def __init__(self, *, max_finished_forks: int) -> None:
        self._max_finished_forks = max_finished_forks
        self._instances: dict[str, InstanceRecord] = {}
        self._instance_order = SortedIds()
        # Instances by TTL; each table is ordered by last report, oldest first.
        self._by_last_seen: dict[float, dict[str, None]] = {}
        self._forks: dict[str, ForkRecord] = {}
        self._fork_order = SortedIds()
        self._live: dict[str, None] = {}  # running forks, ordered by last report, oldest first
        self._live_targets: dict[str, str] = {}
        self._ended: dict[str, None] = {}  # ordered by end
        self._groups: dict[GroupKey, GroupIndex] = {}
        self._models: dict[str, dict[GroupKey, GroupIndex]] = {}
        self._replicas: dict[str, dict[str, None]] = {}  # instances by replica
        self._histories = GroupHistoryCache()
        self._listeners: list[ForkListener] = []
        self._scaleups: dict[str, ScaleUpRecord] = {}
        self._state_listeners: list[StateListener] = []

    # -- changes ----------------------------------------------------------------------------------

    def apply(
        self,
        instances: Iterable[InstanceRecord] = (),
        forks: Iterable[ForkRecord] = (),
        removed: Iterable[str] = (),
        scaleups: Iterable[ScaleUpRecord] = (),
        withdrawn: Iterable[str] = (),
    ) -> None:
        """Insert or replace these records, and remove the instances `removed` and the scale-ups `withdrawn`."""
        for instance in instances:
            self._put_instance(instance)
        for fork in forks:
            self._put_fork(fork)
        for instance_id in removed:
            self._forget(instance_id)
        models: set[str] = set()
        for scaleup_id in withdrawn:
            models |= self._withdraw(scaleup_id)
        for scaleup in scaleups:
            models |= self._withdraw(scaleup.scaleup.scaleup_id) | {scaleup.scaleup.model}
            self._scaleups[scaleup.scaleup.scaleup_id] = scaleup
        if models:
            for listener in self._state_listeners:
                listener.on_scaleups(models)

    def clear(self) -> None:
        """Remove everything, before the store's content is loaded again."""
        for table in (self._instances, self._by_last_seen, self._forks, self._live, self._live_targets):
            table.clear()
        for rest in (self._ended, self._groups, self._models, self._replicas, self._scaleups):
            rest.clear()
        for order in (self._instance_order, self._fork_order):
            order.clear()
        self._histories.clear()

    def notify_reloaded(self) -> None:
        """Notify listeners that the store's content was loaded, after `clear`."""
        for fork in map(self._forks.__getitem__, self._ended):
            # They were added before there was any group.
            if fork.finish is not None and not fork.abandoned:
                self._count(fork, fork.finish)
        for listener in self._state_listeners:
            listener.on_reload()

    def add_state_listener(self, listener: StateListener) -> None:
        """Add a listener for changes that scale-ups depend on; it cannot be removed."""
        self._state_listeners.append(listener)

    def subscribe(self, listener: ForkListener) -> Callable[[], None]:
        """Call `listener` with each applied fork record; return a function that unsubscribes."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # -- instances --------------------------------------------------------------------------------

    def instance(self, instance_id: str) -> InstanceRecord | None:
        """Return the instance's record, if it is known."""
        return self._instances.get(instance_id)

    def instances(self) -> list[InstanceRecord]:
        """Return all instances, in the order they were first added."""
        return list(self._instances.values())

    def instances_after(self, cursor: str | None, replica: str | None = None) -> Iterator[InstanceRecord]:
        """Yield instances after `cursor` (None: all), ordered by id, optionally only the ranks of a replica.
        Lazy; finish iterating before a change.
        """
        prefixes = ("",) if replica is None else [f"{replica}{role}" for role in ROLES]
        ids = chain.from_iterable(self._instance_order.after(cursor, prefix) for prefix in prefixes)
        return map(self._instances.__getitem__, ids)

    def overdue_instances(self, now: float) -> Iterator[InstanceRecord]:
        """Return the instances whose TTL has expired. Costs nothing for the others."""
        for by_last_seen in list(self._by_last_seen.values()):
            for instance_id in list(by_last_seen):
                record = self._instances[instance_id]
                if now < record.expires_at:
                    break
                yield record

    @property
    def instance_count(self) -> int:
        """Number of known instances."""
        return len(self._instances)

    # -- forks ------------------------------------------------------------------------------------

    def fork(self, fork_id: str) -> ForkRecord | None:
        """Return the fork's record, if it is known."""
        return self._forks.get(fork_id)

    def forks(self) -> list[ForkRecord]:
        """Return all forks, in the order they were first added."""
        return list(self._forks.values())

    def forks_after(self, cursor: str | None) -> Iterator[ForkRecord]:
        """Yield forks after `cursor` (None: all), ordered by id, like `instances_after`."""
        return map(self._forks.__getitem__, self._fork_order.after(cursor))

    def live_forks(self) -> list[ForkRecord]:
        """Return the running forks."""
        return [self._forks[fork_id] for fork_id in self._live]

    def live_fork_of(self, instance_id: str) -> ForkRecord | None:
        """Return the running fork whose target is the instance, if there is one."""
        fork_id = self._live_targets.get(instance_id)
        return None if fork_id is None else self._forks[fork_id]

    def overdue_forks(self, since: float) -> Iterator[ForkRecord]:
        """Return the running forks without a report since then. Costs nothing for the others."""
        for fork_id in list(self._live):
            fork = self._forks[fork_id]
            if fork.seen_at > since:
                return
            yield fork

    # -- groups -----------------------------------------------------------------------------------

    def group(self, key: GroupKey) -> GroupIndex:
        """Return the group's index; an empty one if it has no members."""
        return self._groups.get(key) or GroupIndex(key, self._histories.of(key))

    def groups(self) -> list[GroupIndex]:
        """Return the groups that have at least one instance."""
        return list(self._groups.values())

    def histories(self) -> list[GroupHistory]:
        """Return the history of each group, including recent groups without instances."""
        return [group.history for group in self._groups.values()] + self._histories.all()

    def other_ranks(self, key: GroupKey) -> tuple[str, ...]:
        """Return the keys of the other ranks of the same version that have instances."""
        seen = self._models.get(key.model, {})
        return tuple(
            sorted(other.rank_key for other in seen if other.version == key.version and other.rank_key != key.rank_key)
        )

    def other_versions(self, key: GroupKey) -> dict[str, int]:
        """Return how many instances serve each other version of the same model and rank."""
        counts = {
            other.version: sum(source.complete for source in group.sources.values())
            for other, group in self._models.get(key.model, {}).items()
            if other.version != key.version and other.rank_key == key.rank_key
        }
        return {version: count for version, count in sorted(counts.items()) if version and count}

    def models_with_several_versions(self) -> set[str]:
        """Return the models with complete instances of more than one version.

        Versions that only one replica can have do not count: each replica updated in place has its own.
        """
        served: dict[str, set[str]] = {}
        for group in self._groups.values():
            version, sources = group.key.version, group.sources.values()
            if weights_version.is_shareable(version) and any(
                source.complete and source.state != "draining" for source in sources
            ):
                served.setdefault(group.key.model, set()).add(version)
        return {model for model, versions in served.items() if len(versions) > 1}

    def members_of(self, model: str) -> Iterator[InstanceRecord]:
        """Return the records of all instances of one model, of every version and rank."""
        for group in self._models.get(model, {}).values():
            yield from (self._instances[instance_id] for instance_id in group.sources)

    def ranks_of(self, replica: str) -> Iterator[InstanceRecord]:
        """Return the records of all ranks of one replica."""
        return (self._instances[instance_id] for instance_id in self._replicas.get(replica, ()))

    def groups_of(self, model: str) -> list[GroupIndex]:
        """Return the groups of one model."""
        return list(self._models.get(model, {}).values())

    # -- scale-ups --------------------------------------------------------------------------------

    def scaleup(self, scaleup_id: str) -> ScaleUpRecord | None:
        """Return the scale-up's record, if it is known."""
        return self._scaleups.get(scaleup_id)

    def scaleups(self) -> list[ScaleUpRecord]:
        """Return all scale-ups, in the order they were last announced."""
        return list(self._scaleups.values())

    # -- the tables -------------------------------------------------------------------------------

    def _put_instance(self, record: InstanceRecord) -> None:
        instance_id = record.report.instance_id
        old = self._instances.get(instance_id)
        if old is not None and old.group != record.group:
            self._leave_group(old)
        self._instances[instance_id] = record
        if old is None:
            self._instance_order.add(instance_id)
        else:
            del self._by_last_seen[old.ttl_s][instance_id]
        self._by_last_seen.setdefault(record.ttl_s, {})[instance_id] = None
        if old is not None and old.report.replica != record.report.replica:
            self._leave_replica(old)
        if record.report.replica is not None:
            self._replicas.setdefault(record.report.replica, {})[instance_id] = None
        group = self._groups.get(record.group)
        if group is None:
            group = GroupIndex(record.group, self._histories.pop_group(record.group))
            self._groups[record.group] = group
            self._models.setdefault(record.group.model, {})[record.group] = group
        # Readers that no planner replica knows date from before a restart: they count too.
        unplanned_readers = tuple(name for name in record.report.readers if name not in self._forks)
        group.put(record.source, missing=record.reported_missing, unplanned_readers=unplanned_readers)
        if old is None:
            self._resume_forks(record, group)
        if old is None or record.plan_requested != old.plan_requested:
            for listener in self._state_listeners:
                listener.on_instance(record)

    def _resume_forks(self, record: InstanceRecord, group: GroupIndex) -> None:
        """Restore the fork and the readers of an instance that was forgotten, or is new to this replica."""
        forks = [self.live_fork_of(record.report.instance_id)]
        forks += [self._forks.get(name) for name in record.report.readers]
        for fork in forks:
            if fork is not None and fork.live and fork.group == record.group:
                group.apply_plan(fork)

    def _forget(self, instance_id: str) -> None:
        record = self._instances.pop(instance_id, None)
        if record is not None:
            self._instance_order.discard(instance_id)
            del self._by_last_seen[record.ttl_s][instance_id]
            self._leave_group(record)
            self._leave_replica(record)

    def _leave_replica(self, record: InstanceRecord) -> None:
        replica = record.report.replica
        if replica is not None:
            self._replicas[replica].pop(record.report.instance_id, None)
            if not self._replicas[replica]:
                del self._replicas[replica]

    def _leave_group(self, record: InstanceRecord) -> None:
        group = self._groups[record.group]
        group.remove(record.report.instance_id)
        if not group.sources:
            key = record.group
            self._histories.keep(key, group.history)
            del self._groups[key], self._models[key.model][key]
            if not self._models[key.model]:
                del self._models[key.model]

    def _count(self, fork: ForkRecord, finish: ForkResult) -> None:
        group = self._groups.get(fork.group)
        if group is not None:
            group.history.record(fork, finish)
        else:
            self._histories.record(fork.group, fork, finish)

    def _withdraw(self, scaleup_id: str) -> set[str]:
        """Remove a scale-up; return its model, if it was known."""
        old = self._scaleups.pop(scaleup_id, None)
        return set() if old is None else {old.scaleup.model}

    def _put_fork(self, record: ForkRecord) -> None:
        fork_id = record.fork_id
        old = self._forks.get(fork_id)
        self._forks[fork_id] = record
        if old is None:
            self._fork_order.add(fork_id)
        self._live.pop(fork_id, None)
        if record.live:
            self._ended.pop(fork_id, None)
            self._live[fork_id] = None
            self._live_targets[record.instance_id] = fork_id
        else:
            if self._live_targets.get(record.instance_id) == fork_id:
                del self._live_targets[record.instance_id]
            self._ended.setdefault(fork_id)
            while len(self._ended) > self._max_finished_forks:
                oldest = next(iter(self._ended))
                del self._ended[oldest], self._forks[oldest]
                self._fork_order.discard(oldest)
        if old is not None and old.group != record.group and old.group in self._groups:
            self._groups[old.group].end_fork(old)  # its target now adopts another version
        group = self._groups.get(record.group)
        if group is not None:
            if not record.live:
                group.end_fork(record)
                if old is not None and old.abandoned and not record.abandoned:
                    group.record_weights(record)  # it left when it was abandoned
            elif old is None or not old.live or _plan_of(old) != _plan_of(record):
                group.apply_plan(record)
        elif old is not None and (old.live or old.abandoned) and record.finish is not None and not record.abandoned:
            self._histories.record(record.group, record, record.finish)
        for listener in list(self._listeners):
            listener(record)


def _plan_of(
    fork: ForkRecord,
) -> tuple[tuple[RouteRecord, ...], tuple[StorageAssignment, ...], str | None, str | None]:
    """Return the parts of a fork that a group depends on."""
    return fork.reads, fork.storage, fork.weights_id, fork.provisional_id
