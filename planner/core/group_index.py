"""Index of one group, updated with each change, so that a plan inspects only a few members.

The policy weighs sources by distance, load, completeness and progress. The index keeps members in buckets by
the same criteria, for each host, NVLink domain, rack, zone and for the complete group: a change moves one
member between buckets, and the best few of each locality are found without inspecting the others. Buckets are
coarse (load in quarters, progress in eighths), which only affects the choice of candidates.

A member has one slot per reader, up to its maximum. A reader is either a fork whose plan names the member, or
an unplanned reader: a fork that the member reports and that this planner did not plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from planner.core.group_history import GroupHistory
from planner.core.records import ForkRecord, GroupKey
from planner.policy.background import free_slots, is_waiting, targets_waited_for
from planner.policy.transports import has_only_gpu_kernels, has_only_same_host, is_same_host_route
from planner.policy.types import (
    SLOW_FRACTION,
    ChunkShare,
    ContentCount,
    ForkDemand,
    GroupView,
    HostLocation,
    Source,
)
from rfork.image.ranges import count

Content = tuple[str | None, str | None]
"""weights_id, or else provisional_id."""
Scope = tuple[str, ...]
Bucket = tuple[int, int, bool, int]
"""Tier (see `availability_tier`), load in quarters, incomplete, eighths missing: the lowest is best."""
IDLE_SEED: Final = (0, 0, False)
"""The bucket of a seed without readers begins with these."""
MAX_LOAD_LEVEL: Final = 60
"""Quarters from which all loads count as equal."""


class SourceBuckets:
    """The members of one layout and content, in buckets for each locality."""

    def __init__(self) -> None:
        self.scopes: dict[Scope, dict[Bucket, dict[str, None]]] = {}

    def add(self, location: HostLocation, bucket: Bucket, instance_id: str) -> None:
        """Add a member to its bucket of each locality."""
        for scope in localities(location):
            self.scopes.setdefault(scope, {}).setdefault(bucket, {})[instance_id] = None

    def remove(self, location: HostLocation, bucket: Bucket, instance_id: str) -> None:
        """Remove a member from its buckets."""
        for scope in localities(location):
            buckets = self.scopes[scope]
            members = buckets[bucket]
            del members[instance_id]
            if not members:
                del buckets[bucket]
                if not buckets:
                    del self.scopes[scope]

    def move(self, location: HostLocation, old: Bucket, new: Bucket, instance_id: str) -> None:
        """Move a member from one bucket to another."""
        for scope in localities(location):
            buckets = self.scopes[scope]
            members = buckets[old]
            if len(members) == 1:
                # The only member: its bucket is moved with it.
                del buckets[old]
            else:
                del members[instance_id]
                members = {instance_id: None}
            if (others := buckets.get(new)) is None:
                buckets[new] = members
            else:
                others[instance_id] = None

    def best(self, scope: Scope, limit: int) -> list[str]:
        """Return the first `limit` members of a locality, best first."""
        found: list[str] = []
        buckets = self.scopes.get(scope, {})
        for bucket in sorted(buckets):
            found += islice(buckets[bucket], limit - len(found))
            if len(found) == limit:
                break
        return found


def localities(location: HostLocation) -> tuple[Scope, ...]:
    """Return the localities of a member, nearest first."""
    scopes: list[Scope] = [("host", location.host)]
    if location.nvlink is not None:
        scopes.append(("nvlink", location.nvlink))
    if location.rack is not None:
        scopes.append(("rack", location.zone or "", location.rack))
    if location.zone is not None:
        scopes.append(("zone", location.zone))
    scopes.append(("all",))
    return tuple(scopes)


def bucket_key(source: Source, *, free: int, load: float, has_data: bool, missing: bool) -> Bucket:
    """Return the bucket of a member with `free` slots for other hosts, whose readers use `load` of its link.

    `has_data`: its plan has sources; `missing`: a reader could not reach it.
    """
    quarters = min(MAX_LOAD_LEVEL, math.ceil(4 * load / source.egress_share - 0.01)) if load else 0
    missing_quarters = 0 if source.complete else 8 - 8 * source.watermark // max(1, source.chunk_count)
    return (
        availability_tier(source, free, has_data=has_data, missing=missing),
        quarters,
        not source.complete,
        missing_quarters,
    )


def availability_tier(source: Source, free: int, *, has_data: bool, missing: bool) -> int:
    """Return 0: can be read from; 1: slow, or by kernels on its GPU only; 2: no free slot; 3: has no source
    of its own, or serves its own host only; 4: must not be read from.
    """
    if source.state == "draining" or source.quarantine or missing:
        return 4
    if not source.complete and not has_data:
        return 3
    if has_only_same_host(source.transports):
        return 3
    if not free:
        return 2
    return 1 if source.is_slow_relay or has_only_gpu_kernels(source.transports) else 0


def is_engine_seed(source: Source) -> bool:
    """Return True if an engine serves a complete image."""
    return source.holder is None and source.complete and is_readable(source)


def is_readable(source: Source) -> bool:
    """Return True if new readers may be assigned to a member that has something to serve."""
    return source.state != "draining" and not source.quarantine


class ContentCounts:
    """The counts of one group. A member must be removed with the values with which it was added."""

    def __init__(self) -> None:
        self._layouts: dict[str, dict[Content, ContentCount]] = {}

    def counts_for(self, layout_id: str) -> Mapping[Content, ContentCount]:
        """Return how many instances have a layout, by content."""
        return self._layouts.get(layout_id, {})

    @property
    def any_seed(self) -> bool:
        """True if any member serves a complete image."""
        return any(each.seeds for counts_by_content in self._layouts.values() for each in counts_by_content.values())

    def add(self, source: Source) -> None:
        """Count a member, if it serves anything."""
        self._change(source, 1)

    def remove(self, source: Source) -> None:
        """Stop counting a member."""
        self._change(source, -1)

    def _change(self, source: Source, change: int) -> None:
        key = (source.weights_id, None) if source.weights_id else (None, source.provisional_id)
        if key == (None, None) or source.state == "draining" or source.quarantine or not source.verified:
            return
        counts_by_content = self._layouts.setdefault(source.layout_id, {})
        before = counts_by_content.get(key, ContentCount())
        after = ContentCount(
            seeds=before.seeds + change * source.complete,
            instances=before.instances + change,
            generation=max(before.generation, source.generation),
        )
        if after.instances:
            counts_by_content[key] = after
        else:
            del counts_by_content[key]
            if not counts_by_content:
                del self._layouts[source.layout_id]


UNPLANNED_SHARE: Final = 0.5
"""Fraction of its speed that a reader without a known plan is assumed to use."""


class ReaderSlots:
    """The readers of the members that have any, as few of a large group do. They outlive a member's record: it may
    come back.
    """

    def __init__(self) -> None:
        self.readers: dict[str, dict[str, float]] = {}
        """Forks that have a slot at each member, by instance_id, with the fraction of its link's speed that
        each uses.
        """
        self.local: dict[str, set[str]] = {}
        """Those readers that stay within the member's host, by instance_id."""
        self._unplanned_readers: dict[str, tuple[str, ...]] = {}  # by instance_id

    def unplanned_readers(self, instance_id: str) -> tuple[str, ...]:
        """Return the unplanned readers that a member reported last."""
        return self._unplanned_readers.get(instance_id, ())

    def set_unplanned_readers(self, instance_id: str, unplanned_readers: tuple[str, ...]) -> None:
        """Assign slots to the unplanned readers that a member reports, and release those that it no longer
        reports.
        """
        before = self._unplanned_readers.pop(instance_id, ())
        if not (before or unplanned_readers):
            return
        readers, current = self.readers.setdefault(instance_id, {}), set(unplanned_readers)
        for name in before:
            if name not in current and readers.get(name) == UNPLANNED_SHARE:
                del readers[name]
        for name in unplanned_readers:
            readers.setdefault(name, UNPLANNED_SHARE)
        if unplanned_readers:
            self._unplanned_readers[instance_id] = unplanned_readers
        if not readers:
            del self.readers[instance_id]

    def add_reader(self, fork: ForkRecord, chunks: int, speed: float) -> None:
        """Assign a fork a slot at each source of its plan. `chunks`: total chunks of the image; `speed`: the
        fork's read rate as a fraction of its link.
        """
        for route in fork.reads:
            readers = self.readers.setdefault(route.source_id, {})
            readers[fork.fork_id] = speed * count(route.chunks) / chunks
            if is_same_host_route(route.transports):
                self.local.setdefault(route.source_id, set()).add(fork.fork_id)
            if unassigned := self._unplanned_readers.get(route.source_id):
                self._unplanned_readers[route.source_id] = tuple(name for name in unassigned if name != fork.fork_id)

    def release(self, fork: ForkRecord) -> list[str]:
        """Release the fork's slots, and return the sources that it had one at."""
        released: list[str] = []
        for route in fork.reads:
            if (local := self.local.get(route.source_id)) is not None:
                local.discard(fork.fork_id)
                if not local:
                    del self.local[route.source_id]
            readers = self.readers.get(route.source_id)
            if readers is not None and readers.pop(fork.fork_id, None) is not None:
                released.append(route.source_id)
                if not readers:
                    del self.readers[route.source_id]
        return released

    def load(self, instance_id: str) -> float:
        """Return the load that an instance's readers put on its network link, in links."""
        readers, local = self.readers.get(instance_id), self.local.get(instance_id)
        if not readers:
            return 0.0
        if not local:
            return sum(readers.values())
        return sum(share for fork_id, share in readers.items() if fork_id not in local)


MAX_NEARBY: Final = 4
"""Members of each locality of a target that a plan inspects."""
MAX_SAME_HOST: Final = 16
"""Members on a target's own host that a plan inspects: usually all of them."""
MAX_SLOW: Final = 64
"""Slow members that a plan for slow targets inspects: they read from one another."""
MAX_ANYWHERE: Final = 12
"""Members of the complete group that a plan inspects, in addition to one per target of the batch."""


class GroupIndex:
    """All members of one group, their forks, and the readers of each member."""

    def __init__(self, key: GroupKey, history: GroupHistory | None = None) -> None:
        """`history`: statistics of the group's earlier forks; None if there are none."""
        self.key = key
        self.sources: dict[str, Source] = {}
        self.shares: dict[str, tuple[ChunkShare, ...]] = {}
        self._forks: dict[str, ForkRecord] = {}  # by target
        self.background_forks: dict[str, str] = {}
        """Targets of holders' running forks, by fork_id."""
        self._waited_for: frozenset[str] | None = None  # holders' images that engines depend on; None: not known
        self._reader_slots = ReaderSlots()
        self._missing: set[str] = set()
        self._slow: dict[str, None] = {}  # members that fall behind their sources
        self._elected: dict[str, None] = {}  # targets that read storage for the group
        self._buckets_by_layout: dict[tuple[str, Content], SourceBuckets] = {}
        self._bucket_of_member: dict[str, tuple[tuple[str, Content], Bucket]] = {}
        self._contents = ContentCounts()
        self._members_by_host: dict[str, dict[str, None]] = {}
        self.shared_hosts: dict[str, dict[str, None]] = {}
        """Members on each host that has a holder's image."""
        self._layouts: dict[str, dict[str, None]] = {}
        self._engines: dict[str, dict[str, None]] = {}  # members without a holder, by layout
        self._engine_seeds: Counter[str] = Counter()  # by layout
        self.complete_count = 0
        """Number of members with the complete weights, whether or not they can be read from."""
        self.history = GroupHistory() if history is None else history
        self.had_seed = False
        """True if any member ever had the complete weights."""
        self.loader_only = False
        """True if a loader ran here for the group and its instance served nothing."""

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.key.model

    @property
    def version(self) -> str:
        """Version of the weights; empty for targets whose version is not resolved yet."""
        return self.key.version

    @property
    def rank_key(self) -> str:
        """Key of the rank."""
        return self.key.rank_key

    @property
    def readers(self) -> Mapping[str, Mapping[str, float]]:
        """Forks that read from each member, by instance_id (see `ReaderSlots`)."""
        return self._reader_slots.readers

    def is_background(self, fork_id: str) -> bool:
        """Return True for a running fork that no engine waits for; see `planner.policy.background`."""
        target_id = self.background_forks.get(fork_id)
        return target_id is not None and target_id not in self._targets_waited_for

    def serves_engines(self, instance_id: str) -> bool:
        """Return True if a fork that an engine waits for reads from the member over the network."""
        local = self._reader_slots.local.get(instance_id, ())
        readers = self._reader_slots.readers.get(instance_id, ())
        return any(fork_id not in local and not self.is_background(fork_id) for fork_id in readers)

    def free_slots(self, source: Source, *, same_host: bool) -> int:
        """Return how many more forks on the member's host, or on others, may read from it."""
        readers = self._reader_slots.readers.get(source.instance_id, ())
        local = self._reader_slots.local.get(source.instance_id, ())
        has_own_engine = any(not self.is_background(fork_id) for fork_id in local)
        return free_slots(source, len(readers), same_host=same_host, has_own_engine=has_own_engine)

    @property
    def engine_waits(self) -> bool:
        """True if an engine's target misses chunks for which its plan has no source."""
        return any((target := self.sources.get(name)) and is_waiting(target, self.shares[name]) for name in self._forks)

    @property
    def _targets_waited_for(self) -> frozenset[str]:
        if self._waited_for is None:
            self._waited_for = targets_waited_for(self._forks, self.sources.get, lambda name: self.shares.get(name, ()))
        return self._waited_for

    # -- changes ----------------------------------------------------------------------------------

    def put(self, source: Source, *, missing: bool = False, unplanned_readers: Sequence[str] = ()) -> None:
        """Add or replace a member. `missing`: a reader could not reach it, so its own reads do not count.
        `unplanned_readers`: forks that read from it without a plan of this planner.
        """
        instance_id, old = source.instance_id, self.sources.get(source.instance_id)
        if source.background:
            self._waited_for = None
        same = missing == (instance_id in self._missing)
        same = same and self._reader_slots.unplanned_readers(instance_id) == tuple(unplanned_readers)
        if same and old is not None and self._same_index_entry(old, source):
            self.sources[instance_id] = source
            return
        joins_layout = old is None or (source.layout_id, source.holder) != (old.layout_id, old.holder)
        joins_host = old is None or (source.location.host, source.holder) != (old.location.host, old.holder)
        if old is not None:
            self._unindex(instance_id)
            if joins_layout:
                self._leave_layout(instance_id)
            if joins_host:
                self._leave_host(instance_id)
        self.sources[instance_id] = source
        if joins_host:
            self._join_host(source)
        if joins_layout:
            self._join_layout(source)
        if source.slow:
            self._slow[instance_id] = None
        else:
            self._slow.pop(instance_id, None)
        self._reader_slots.set_unplanned_readers(instance_id, tuple(unplanned_readers))
        if missing != (instance_id in self._missing):
            self._set_missing(instance_id, missing)
        self._index(instance_id)
        self._mark_background(instance_id)
        self.loader_only = self.loader_only and not source.complete
        self.had_seed = self.had_seed or source.complete
        fork = self._forks.get(instance_id)
        if fork is not None and not missing and old is not None and old.slow != source.slow:
            self._assign_slots(fork)

    def remove(self, instance_id: str) -> None:
        """Remove a member. Its fork and its readers are updated by other calls."""
        self._waited_for = None
        if instance_id in self.sources:
            self._unindex(instance_id)
            self._leave_layout(instance_id)
            self._leave_host(instance_id)
            del self.sources[instance_id]
            self._slow.pop(instance_id, None)
        # Its planned readers keep their slots.
        self._reader_slots.set_unplanned_readers(instance_id, ())
        self._missing.discard(instance_id)

    def apply_plan(self, fork: ForkRecord) -> None:
        """Record a fork's new plan."""
        target_id = fork.instance_id
        old = self._forks.get(target_id)
        self._waited_for = None
        if old is not None:
            self._release_slots(old)
        self._forks[target_id] = fork
        peers = tuple(ChunkShare(read.source_id, read.chunks) for read in fork.reads)
        own = tuple(ChunkShare(target_id, read.chunks, read.kind == "loader") for read in fork.storage)
        self.shares[target_id] = peers + own
        if old is not None:
            self.background_forks.pop(old.fork_id, None)
        self._mark_background(target_id)
        self._elected.pop(target_id, None)
        if own:
            self._elected[target_id] = None
        if target_id not in self._missing:
            self._assign_slots(fork)
        self._refresh(target_id)

    def end_fork(self, fork: ForkRecord) -> None:
        """Remove a fork that ended."""
        target_id = fork.instance_id
        known = self._forks.get(target_id)
        if known is not None and known.fork_id == fork.fork_id:
            self._release_slots(known)
            del self._forks[target_id]
            self._waited_for = None
            self.background_forks.pop(fork.fork_id, None)
            self.shares.pop(target_id, None)
            self._elected.pop(target_id, None)
            self._refresh(target_id)
            self.record_weights(fork)

    def record_weights(self, fork: ForkRecord) -> None:
        """Learn from a finished fork for later ones; nothing if it was abandoned."""
        if fork.finish is None or fork.abandoned:
            return
        self.history.record(fork, fork.finish)
        ran_loader = any(read.kind == "loader" for read in fork.storage)
        if ran_loader and fork.finish.outcome != "forked":
            self.loader_only = True

    # -- the policy's view ----------------------------------------------------------------------------

    def view(
        self,
        demands: Sequence[ForkDemand],
        other_ranks: tuple[str, ...] = (),
        *,
        other_versions: Mapping[str, int] | None = None,
        together: int = 0,
        receiving_hosts: Container[str] = frozenset(),
        sending_hosts: Container[str] = frozenset(),
    ) -> GroupView:
        """Return the group as seen by these demands (of one layout, or of few): sources, readers, candidates.

        `together`: total number of targets; those not among `demands` differ from these by their hosts, which
        have no members. `receiving_hosts` and `sending_hosts`: see `GroupView`.
        """
        layouts = dict.fromkeys(demand.target.layout_id for demand in demands)
        candidates: dict[str, None] = {}
        for layout_id in layouts:
            same_layout = [demand for demand in demands if demand.target.layout_id == layout_id]
            candidates |= dict.fromkeys(self._candidates(layout_id, same_layout, together))
        others = {name: len(members) for name, members in self._layouts.items() if name not in layouts}
        for name in others:
            candidates[min(list(self._layouts[name])[:MAX_ANYWHERE], key=self._score)] = None
        content_counts = [self.content_counts(layout_id) for layout_id in layouts]
        return GroupView(
            model=self.model,
            rank_key=self.rank_key,
            sources=self.sources,
            readers=self._reader_slots.readers,
            same_host_readers=self._reader_slots.local,
            shares=self.shares,
            background_forks=self.background_forks,
            shared_hosts=self.shared_hosts,
            receiving_hosts=receiving_hosts,
            sending_hosts=sending_hosts,
            loader_only=self.loader_only,
            candidates=tuple(candidates),
            content_counts=content_counts[0] if len(content_counts) == 1 else None,
            other_layouts=others,
            other_ranks=other_ranks,
            version=self.version,
            other_versions=other_versions or {},
        )

    @property
    def storage_readers(self) -> Collection[str]:
        """Members that currently read their own storage."""
        return [name for name in self._elected if name in self.sources]

    def idle_seeds(self, target: Source, limit: int = 1) -> list[Source]:
        """Return up to `limit` seeds without readers for the weights that the target receives."""
        buckets = self._buckets_by_layout.get((target.layout_id, self._content(target)))
        best = () if buckets is None else buckets.best(("all",), limit)
        return [self.sources[name] for name in best if self._bucket_of_member[name][1][:3] == IDLE_SEED]

    def content_counts(self, layout_id: str) -> Mapping[Content, ContentCount]:
        """Return how many instances have a layout, by content."""
        return self._contents.counts_for(layout_id)

    @property
    def layouts(self) -> Collection[str]:
        """Layouts of the members."""
        return self._layouts

    def newest_of(self, layout_id: str) -> str:
        """Return the member of a layout that joined the group last, an engine if there is one."""
        return next(reversed(self._engines.get(layout_id) or self._layouts[layout_id]))

    def seeds_of(self, layout_id: str, weights_id: str | None) -> Iterator[str]:
        """Yield the members that serve these complete weights and can be read from."""
        for name in self._layouts.get(layout_id, ()):
            source = self.sources[name]
            if source.weights_id == weights_id and source.complete and is_readable(source):
                yield name

    def engine_seeds(self, layout_id: str) -> int:
        """Return the number of seeds of a layout that can be read from and belong to engines, not to holders."""
        return self._engine_seeds[layout_id]

    def has_relay(self, layout_id: str) -> bool:
        """Return True if a target of this layout reads from a source or from storage."""
        return any(
            shares and (source := self.sources.get(name)) is not None and source.layout_id == layout_id
            for name, shares in self.shares.items()
        )

    @property
    def orphaned(self) -> bool:
        """True if the group has members but no source left, though it had one.

        A group whose last members are draining does not count: they shut down, as in a rollout of another
        version. Nor does one whose last members are images that holders still receive.
        """
        if not self.had_seed or self._contents.any_seed:
            return False
        return any(source.state != "draining" and source.holder is None for source in self.sources.values())

    def _candidates(self, layout_id: str, demands: Sequence[ForkDemand], together: int) -> list[str]:
        """Return members of a layout: those that read storage, and the best of each of the targets'
        localities. Some are listed several times.
        """
        # Include those without a free slot: no other instance has to read what they read.
        found = [name for name in self._elected if self._is_provider(name, layout_id)][:MAX_ANYWHERE]
        if any(demand.target.slow for demand in demands):
            found += [name for name in self._slow if self._is_provider(name, layout_id)][:MAX_SLOW]
        contents = [content for name, content in self._buckets_by_layout if name == layout_id]
        wanted_contents: dict[Content, list[ForkDemand]] = {}
        counts_by_content = self._contents.counts_for(layout_id)
        best = max(
            counts_by_content,
            key=lambda key: (counts_by_content[key], key[0] or "", key[1] or ""),
            default=(None, None),
        )
        for demand in demands:
            target = demand.target
            begun = target.verified and (target.weights_id or target.provisional_id)
            own = (target.weights_id, None) if target.weights_id else (None, target.provisional_id)
            wanted_contents.setdefault(own if begun else best, []).append(demand)
            found += [share.source_id for share in demand.current_shares]
        for content, same_content in wanted_contents.items():
            # A provisional content may be final by now, and a target that follows one by its plan alone has
            # not reported it yet. Where no seed serves the requested content, others may be reading other
            # files by now; nor does one help that a fork avoids.
            has_seed = counts_by_content.get(content, ContentCount()).seeds > 0
            accepts_others = not has_seed or any(demand.excluded for demand in same_content)
            matching = [name for name in contents if name == content or name[0] is None or accepts_others]
            for name in matching:
                buckets = self._buckets_by_layout[layout_id, name]
                found += self._nearby(buckets, same_content, max(len(same_content), together))
            if not matching:
                for name in contents[:MAX_NEARBY]:
                    found += self._buckets_by_layout[layout_id, name].best(("all",), 1)
        return found

    def _nearby(self, buckets: SourceBuckets, demands: Sequence[ForkDemand], together: int) -> list[str]:
        scopes = dict.fromkeys(scope for demand in demands for scope in localities(demand.target.location))
        limits = {"host": MAX_SAME_HOST, "all": MAX_ANYWHERE + together}
        found: list[str] = []
        for scope in scopes:
            found += buckets.best(scope, limits.get(scope[0], MAX_NEARBY))
        return found

    def _is_provider(self, instance_id: str, layout_id: str) -> bool:
        source = self.sources.get(instance_id)
        return source is not None and source.layout_id == layout_id

    def _score(self, instance_id: str) -> tuple[bool, str]:
        return not self.sources[instance_id].complete, instance_id

    def _set_missing(self, instance_id: str, missing: bool) -> None:
        """Record that a member is missing, or that it is back."""
        fork = self._forks.get(instance_id)
        if missing:
            self._missing.add(instance_id)
            if fork is not None:
                self._release_slots(fork)
        else:
            self._missing.discard(instance_id)
            if fork is not None:
                self._assign_slots(fork)

    def _mark_background(self, target_id: str) -> None:
        """Record that the running fork of a member, if it has one, is a holder's."""
        fork, target = self._forks.get(target_id), self.sources.get(target_id)
        if fork is not None and target is not None and target.background:
            self.background_forks[fork.fork_id] = target_id

    def _same_index_entry(self, old: Source, new: Source) -> bool:
        """Return True if a report changes nothing that the index depends on, as most heartbeats do."""
        indexed_values = [
            (each.layout_id, each.weights_id, each.provisional_id, each.generation, each.state, each.complete,
             each.location, each.quarantine, each.slow, each.holder, bool(each.verified))
            for each in (old, new)
        ]  # fmt: skip
        return indexed_values[0] == indexed_values[1] and self._bucket_of_member[old.instance_id][1] == self._bucket(
            new
        )

    # -- slots and buckets ----------------------------------------------------------------------------

    def _assign_slots(self, fork: ForkRecord) -> None:
        target = self.sources.get(fork.instance_id)
        chunks = sum(count(share.chunks) for share in self.shares[fork.instance_id])
        self._reader_slots.add_reader(fork, chunks, SLOW_FRACTION if target is not None and target.slow else 1.0)
        for read in fork.reads:
            self._refresh(read.source_id)

    def _release_slots(self, fork: ForkRecord) -> None:
        for source_id in self._reader_slots.release(fork):
            self._refresh(source_id)

    def _refresh(self, instance_id: str) -> None:
        """Move a member to another bucket if its load or its plan changed that."""
        source = self.sources.get(instance_id)
        if source is None:
            return
        old = self._bucket_of_member[instance_id]
        new = (source.layout_id, self._content(source)), self._bucket(source)
        if new == old:
            return
        self._bucket_of_member[instance_id] = new
        if new[0] == old[0]:
            self._buckets_by_layout[new[0]].move(source.location, old[1], new[1], instance_id)
            return
        self._remove_from_bucket(source, *old)
        self._buckets_by_layout.setdefault(new[0], SourceBuckets()).add(source.location, new[1], instance_id)

    def _index(self, instance_id: str) -> None:
        source = self.sources[instance_id]
        buckets = source.layout_id, self._content(source)
        bucket = self._bucket(source)
        self._bucket_of_member[instance_id] = buckets, bucket
        self._buckets_by_layout.setdefault(buckets, SourceBuckets()).add(source.location, bucket, instance_id)
        self._contents.add(source)
        self._engine_seeds[source.layout_id] += is_engine_seed(source)
        self.complete_count += source.complete

    def _unindex(self, instance_id: str) -> None:
        source = self.sources[instance_id]
        self._remove_from_bucket(source, *self._bucket_of_member.pop(instance_id))
        self._contents.remove(source)
        self._engine_seeds[source.layout_id] -= is_engine_seed(source)
        self.complete_count -= source.complete

    def _remove_from_bucket(self, source: Source, buckets: tuple[str, Content], bucket: Bucket) -> None:
        self._buckets_by_layout[buckets].remove(source.location, bucket, source.instance_id)
        if not self._buckets_by_layout[buckets].scopes:
            del self._buckets_by_layout[buckets]

    def _join_host(self, source: Source) -> None:
        host = source.location.host
        members = self._members_by_host.setdefault(host, {})
        members[source.instance_id] = None
        if source.background:
            self.shared_hosts[host] = members

    def _leave_host(self, instance_id: str) -> None:
        host = self.sources[instance_id].location.host
        members = self._members_by_host[host]
        members.pop(instance_id, None)
        if not members:
            del self._members_by_host[host]
        if host in self.shared_hosts and not any(self.sources[name].background for name in members):
            del self.shared_hosts[host]

    def _join_layout(self, source: Source) -> None:
        self._layouts.setdefault(source.layout_id, {})[source.instance_id] = None
        if source.holder is None:
            self._engines.setdefault(source.layout_id, {})[source.instance_id] = None

    def _leave_layout(self, instance_id: str) -> None:
        layout_id = self.sources[instance_id].layout_id
        for members_by_layout in (self._layouts, self._engines):
            members = members_by_layout.get(layout_id, {})
            members.pop(instance_id, None)
            if not members:
                members_by_layout.pop(layout_id, None)

    def _content(self, source: Source) -> Content:
        """Return the content that the member has, or is receiving by its plan."""
        fork = self._forks.get(source.instance_id)
        if source.weights_id is not None or (
            fork is not None and fork.weights_id is not None and not source.provisional_id
        ):
            return source.weights_id or (fork.weights_id if fork else None), None
        return None, source.provisional_id or (fork.provisional_id if fork else None)

    def _bucket(self, source: Source) -> Bucket:
        instance_id = source.instance_id
        readers, local = self._reader_slots.readers.get(instance_id, ()), self._reader_slots.local.get(instance_id)
        return bucket_key(
            source,
            free=free_slots(source, len(readers), same_host=False, has_own_engine=bool(local)),
            load=self._reader_slots.load(instance_id),
            has_data=bool(self.shares.get(instance_id)),
            missing=instance_id in self._missing,
        )
