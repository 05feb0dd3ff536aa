"""Records of one planner replica, by id, and each group's index for the policy.

A store decides which changes are applied, and in which order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterator
from itertools import chain
from typing import Final

from planner.core.group_history import GroupHistory, GroupHistoryCache
from planner.core.group_index import GroupIndex
from planner.core.holders import Holders
from planner.core.records import ForkRecord, GroupKey, InstanceRecord, RouteRecord, StoreChange
from planner.core.scaleups import ScaleUpForecast, ScaleUps
from planner.policy.prefetch import FleetImage, LocalEngine, wanted_images
from planner.policy.transports import is_same_host_route
from planner.policy.types import Source
from rfork import weights_version
from rfork.schema import ForkResult, HolderReport, ImageKey, Rank, StorageAssignment, WantedImage

ForkListener = Callable[[ForkRecord], None]
ScaleUpListener = Callable[[], None]
"""Called after a replica has arrived, or when the expected replicas have changed."""
ROLES: Final = ("-main-", "-speculative-")
"""Separators after a replica's name in the ids of its instances (see `rfork.schema.Rank`), sorted."""


LAST: Final = chr(0x10FFFF)
"""Suffix that sorts after every id with the same prefix."""
MAX_FINISHED_FORKS: Final = 1000
"""Finished forks that the planner keeps for its lists."""


class SortedIds:
    """Sorted set of ids. Adding and removing costs a search and a pointer move within one flat list: about 10
    µs among 20,000.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []

    def add(self, new: str) -> None:
        """Add an id, unless present."""
        index = bisect_left(self._ids, new)
        if index == len(self._ids) or self._ids[index] != new:
            self._ids.insert(index, new)

    def discard(self, old: str) -> None:
        """Remove an id, if present."""
        index = bisect_left(self._ids, old)
        if index < len(self._ids) and self._ids[index] == old:
            del self._ids[index]

    def clear(self) -> None:
        """Remove all ids."""
        self._ids.clear()

    def after(self, cursor: str | None, prefix: str = "") -> Iterator[str]:
        """Yield the ids after `cursor` (None: all) that start with `prefix`, in order; lazy.

        Finish iterating before an id is added or removed.
        """
        first = bisect_left(self._ids, prefix)
        if cursor is not None:
            first = max(first, bisect_right(self._ids, cursor))
        end = bisect_left(self._ids, prefix + LAST) if prefix else len(self._ids)
        return map(self._ids.__getitem__, range(first, end))


def _serves(source: Source) -> bool:
    return source.complete and source.state != "draining"


def _serves_as_engine(source: Source) -> bool:
    return source.holder is None and _serves(source)


def _is_first(rank: Rank) -> bool:
    return rank.tp == rank.pp == rank.ep == 0


def _is_complete(source: Source) -> bool:
    return source.complete


class HostSet(Container[str]):
    """The hosts that meet a condition."""

    def __init__(self, condition: Callable[[str], bool]) -> None:
        self._condition = condition

    def __contains__(self, host: object) -> bool:
        return isinstance(host, str) and self._condition(host)


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
        self._hosts: dict[str, dict[str, None]] = {}  # instances by host
        self._histories = GroupHistoryCache()
        self._listeners: list[ForkListener] = []
        self._scaleup_listeners: list[ScaleUpListener] = []
        self.scaleups = ScaleUps()
        self.holders = Holders()
        self.reloads = 0
        """Number of times that everything was loaded again."""

    # -- changes ----------------------------------------------------------------------------------

    def apply(self, change: StoreChange) -> None:
        """Insert or replace the records of a change, and remove those that it removes."""
        arrivals = [self._put_instance(instance) for instance in change.instances]
        for fork in change.forks:
            self._put_fork(fork)
        for instance_id in change.removed:
            self._forget(instance_id)
        self.holders.apply(change.holders, change.removed_holders)
        models = self.scaleups.apply(change.scaleups, change.withdrawn)
        for model in models:
            self.scaleups.recount(model, self.members_of(model))
        if models or any(arrivals):
            self._notify_scaleups()

    def clear(self) -> None:
        """Remove everything, before the store's content is loaded again."""
        for table in (self._instances, self._by_last_seen, self._forks, self._live, self._live_targets):
            table.clear()
        for rest in (self._ended, self._groups, self._models, self._replicas, self._hosts):
            rest.clear()
        for order in (self._instance_order, self._fork_order):
            order.clear()
        self._histories.clear()
        self.scaleups = ScaleUps()
        self.holders = Holders()

    def notify_reloaded(self) -> None:
        """Notify listeners that the store's content was loaded, after `clear`."""
        for fork in map(self._forks.__getitem__, self._ended):
            # They were added before there was any group.
            if fork.finish is not None and not fork.abandoned:
                self._count(fork, fork.finish)
        self.reloads += 1
        self._notify_scaleups()

    def subscribe(self, listener: ForkListener) -> Callable[[], None]:
        """Call `listener` with each applied fork record; return a function that unsubscribes."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def subscribe_scaleups(self, listener: ScaleUpListener) -> None:
        """Call `listener` after each change that scale-ups depend on; it cannot be removed."""
        self._scaleup_listeners.append(listener)

    def _notify_scaleups(self) -> None:
        for listener in self._scaleup_listeners:
            listener()

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
            other.version: group.complete_count
            for other, group in self._models.get(key.model, {}).items()
            if other.version != key.version and other.rank_key == key.rank_key
        }
        return {version: count for version, count in sorted(counts.items()) if version and count}

    def models_with_several_versions(self) -> set[str]:
        """Return the models with complete engines of more than one version.

        Versions that only one replica can have do not count: each replica updated in place has its own. Nor do
        holders, which keep an earlier version for a while.
        """
        served: dict[str, set[str]] = {}
        for group in self._groups.values():
            version, sources = group.key.version, group.sources.values()
            if weights_version.is_shareable(version) and any(map(_serves_as_engine, sources)):
                served.setdefault(group.key.model, set()).add(version)
        return {model for model, versions in served.items() if len(versions) > 1}

    def members_of(self, model: str) -> Iterator[InstanceRecord]:
        """Return the records of all instances of one model, of every version and rank."""
        for group in self._models.get(model, {}).values():
            yield from (self._instances[instance_id] for instance_id in group.sources)

    def representatives_of(self, model: str, role: str, other_than: str) -> Iterator[InstanceRecord]:
        """Yield enough instances to know which versions of a model are served, received, complete or read from storage.

        Of each group these are one in each of these states, if there is one, an engine if possible, and all that read
        storage. Unlike `members_of`, this does not visit all members of a group that has a seed.
        """
        groups = [group for group in self._models.get(model, {}).values() if self._role_of(group) == role]
        serving = [
            self._first(group, other_than, _serves_as_engine) or self._first(group, other_than, _serves)
            for group in groups
        ]
        no_group_serves = not any(serving)
        for group, found in zip(groups, serving, strict=True):
            complete = found or self._first(group, other_than, _is_complete)
            begun = self._first(group, other_than, self._has_begun) if no_group_serves else None
            for name in dict.fromkeys((complete, begun, *group.storage_readers)):
                if name is not None and name != other_than:
                    yield self._instances[name]

    def _role_of(self, group: GroupIndex) -> str:
        return self._instances[next(iter(group.sources))].report.rank.role

    def _has_begun(self, source: Source) -> bool:
        record = self._instances[source.instance_id]
        return record.plan_requested or bool(record.resolved_version)

    @staticmethod
    def _first(group: GroupIndex, other_than: str, condition: Callable[[Source], bool]) -> str | None:
        """Return the first member, other than one, that meets a condition."""
        for name, source in group.sources.items():
            if name != other_than and condition(source):
                return name
        return None

    def ranks_of(self, replica: str) -> Iterator[InstanceRecord]:
        """Return the records of all ranks of one replica."""
        return (self._instances[instance_id] for instance_id in self._replicas.get(replica, ()))

    def groups_of(self, model: str) -> list[GroupIndex]:
        """Return the groups of one model."""
        return list(self._models.get(model, {}).values())

    def fleet_images(self, model: str) -> list[FleetImage]:
        """Return the images of one model, and of the drafts in its replicas."""
        images: list[FleetImage] = []
        draft_models: dict[str, None] = {}
        for group in self.groups_of(model):
            for layout_id in group.layouts:
                image, newest = self._fleet_image(group, layout_id)
                images.append(image)
                if _is_first(newest.report.rank):
                    replica = list(self.ranks_of(newest.report.replica or ""))
                    draft_models |= {each.report.model: None for each in replica if each.report.rank.role != "main"}
        draft_models.pop(model, None)
        for draft_model in draft_models:
            for group in self.groups_of(draft_model):
                if self._role_of(group) != "main":
                    images += [self._fleet_image(group, layout_id)[0] for layout_id in group.layouts]
        return images

    def engines_on(self, host: str) -> list[LocalEngine]:
        """Return the engines on a host, the most recent first."""
        records = [self._instances[instance_id] for instance_id in self._hosts.get(host, ())]
        engines = sorted(
            (record for record in records if record.report.holder is None),
            key=lambda record: (record.since, record.report.instance_id),
            reverse=True,
        )
        return [
            LocalEngine(
                self._fleet_image(self._groups[record.group], record.report.layout_id)[0], record.source.complete
            )
            for record in engines
        ]

    def engine_images(self, host: str) -> set[ImageKey]:
        """Return the images that engines on a host have completely."""
        records = (self._instances[instance_id] for instance_id in self._hosts.get(host, ()))
        return {
            ImageKey(*record.group, record.report.layout_id)
            for record in records
            if record.report.holder is None and record.source.complete
        }

    @property
    def receiving_hosts(self) -> HostSet:
        """Hosts on which forks that engines wait for read over the network."""
        return HostSet(self._receives)

    @property
    def sending_hosts(self) -> HostSet:
        """Hosts from which forks that engines wait for read over the network."""
        return HostSet(self._sends)

    def _receives(self, host: str) -> bool:
        for instance_id in self._hosts.get(host, ()):
            fork = self.live_fork_of(instance_id)
            if fork is None or self.group(fork.group).is_background(fork.fork_id):
                continue
            if any(not is_same_host_route(read.transports) for read in fork.reads):
                return True
        return False

    def _sends(self, host: str) -> bool:
        records = (self._instances[instance_id] for instance_id in self._hosts.get(host, ()))
        return any(self._groups[record.group].serves_engines(record.report.instance_id) for record in records)

    def wanted_images(self, report: HolderReport, now: float, *, keeps_all: bool = False) -> tuple[WantedImage, ...]:
        """Return the images that a holder should keep, most urgent first (see `prefetch.wanted_images`)."""
        host = report.placement.host
        announced = self.scaleups.announced_for(host, now) if report.follows_host else []
        starting = self.holders.starting_on(host) if report.follows_host else []
        models = {each.model for each in announced} | {each.model for each in (*starting, *report.selectors)}
        fleet = {model: self.fleet_images(model) for model in models}
        return wanted_images(report, fleet, self.engines_on(host), announced, starting, keeps_all=keeps_all)

    def _fleet_image(self, group: GroupIndex, layout_id: str) -> tuple[FleetImage, InstanceRecord]:
        """Return an image of the group, and the newest instance that has it."""
        newest = self._instances[group.newest_of(layout_id)]
        report = newest.report
        image = FleetImage(
            model=group.model,
            version=group.version,
            rank=report.rank,
            layout_id=layout_id,
            image_bytes=report.image_bytes,
            seeds=sum(count.seeds for count in group.content_counts(layout_id).values()),
            engine_seeds=group.engine_seeds(layout_id),
            has_relay=group.has_relay(layout_id),
            since=newest.since,
        )
        return image, newest

    def source_rate_limits(self, fork: ForkRecord) -> dict[str, int]:
        """Return the egress limits (bytes per second) of a fork's sources, by instance_id, for those that have one.

        Taken from the source's last heartbeat; for a source that was removed, from the fork's record.
        """
        rates: dict[str, int] = {}
        for read in fork.reads:
            source = self.instance(read.source_id)
            rate = fork.source_rate_limits.get(read.source_id) if source is None else source.report.egress_rate
            if rate is not None:
                rates[read.source_id] = rate
        return rates

    def forecast(self, model: str, version: str | None) -> ScaleUpForecast:
        """Return the sources and the size that new replicas of a model can expect."""
        groups = self.groups_of(model)
        return ScaleUpForecast.of(
            model, version, [(group, self._instances[next(iter(group.sources))]) for group in groups]
        )

    # -- the tables -------------------------------------------------------------------------------

    def _put_instance(self, record: InstanceRecord) -> bool:
        """Insert or replace an instance. Return True if a replica of a scale-up may have arrived with it."""
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
        if old is not None and old.report.placement.host != record.report.placement.host:
            self._leave_host(old)
        self._hosts.setdefault(record.report.placement.host, {})[instance_id] = None
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
        if old is not None and record.plan_requested == old.plan_requested:
            return False
        self.scaleups.add(record)
        return record.plan_requested and record.report.holder is None

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
            self._leave_host(record)

    def _leave_host(self, record: InstanceRecord) -> None:
        host = record.report.placement.host
        self._hosts[host].pop(record.report.instance_id, None)
        if not self._hosts[host]:
            del self._hosts[host]

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
