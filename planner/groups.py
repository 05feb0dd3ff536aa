"""The index of one group: kept up to date by each change, so that a plan looks at a few members only.

The policy weighs sources by distance, load, completeness and progress. Here members lie in buckets by
just these, for each host, NVLink domain, rack and zone and for the whole group: a change moves one
member between buckets, and the best few of each neighbourhood are found without a look at the others.
What is coarse here (load in quarters, progress in eighths) only decides who is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from planner.durations import Durations
from planner.fleet import SLOW, Demand, Group, Holders, Share, Source
from planner.policy.ways import only_on_kernels, only_one_host, takes_one_host
from planner.shelf import Bucket, Content, Shelf, scopes_of
from rfork.image.ranges import count
from rfork.wire import ForkFinish, source_kind

if TYPE_CHECKING:
    from planner.store.records import ForkRecord

NEAR: Final = 4
"""Members of each neighbourhood of a target that a plan looks at."""
HOSTED: Final = 16
"""Members of a target's own host that a plan looks at: all of them, on most."""
ANY: Final = 12
"""Members of the whole group that a plan looks at, besides one for each target of the batch."""
STRANGER: Final = 0.5
"""Part of its speed that a reader is taken to want whose plan is not known."""


class LiveGroup:
    """All members of one group, their forks, and who reads from whom."""

    def __init__(self, model: str, rank_key: str) -> None:
        self.model = model
        self.rank_key = rank_key
        self.sources: dict[str, Source] = {}
        self.readers: dict[str, dict[str, float]] = {}
        self.local: dict[str, set[str]] = {}
        self.shares: dict[str, tuple[Share, ...]] = {}
        self._forks: dict[str, ForkRecord] = {}  # by target
        self._strangers: dict[str, tuple[str, ...]] = {}
        self._missing: set[str] = set()
        self._elected: dict[str, None] = {}  # targets that read storage for all
        self._shelves: dict[tuple[str, Content], Shelf] = {}
        self._places: dict[str, tuple[tuple[str, Content], Bucket]] = {}
        self._holders: dict[str, dict[Content, Holders]] = {}
        self._layouts: dict[str, dict[str, None]] = {}
        self.storage_bytes = 0
        """What the forks that ended read from storage, and from one another."""
        self.forked_bytes = 0
        self.durations = Durations()
        self.seeded = False
        """Whether somebody held the weights whole, at any time."""
        self.alone = False
        """Whether a loader was run here for all, and its instance gave nothing."""

    # -- changes ----------------------------------------------------------------------------------

    def put(self, source: Source, *, missing: bool = False, strangers: Sequence[str] = ()) -> None:
        """Add a member, or replace it. `missing`: a reader found it gone, so its own reads do not count.
        `strangers`: forks that read from it and that nobody planned.
        """
        instance_id, old = source.instance_id, self.sources.get(source.instance_id)
        same = missing == (instance_id in self._missing)
        same = same and self._strangers.get(instance_id) == tuple(strangers)
        if same and old is not None and self._same_place(old, source):
            self.sources[instance_id] = source
            return
        if old is not None:
            self._take_down(instance_id)
            if source.layout_id != old.layout_id:
                self._leave_layout(instance_id)
        self.sources[instance_id] = source
        self._layouts.setdefault(source.layout_id, {})[instance_id] = None
        self._greet(instance_id, tuple(strangers))
        if missing != (instance_id in self._missing):
            self._miss(instance_id, missing)
        self._put_up(instance_id)
        self.alone = self.alone and not source.complete
        self.seeded = self.seeded or source.complete
        fork = self._forks.get(instance_id)
        if fork is not None and not missing and old is not None and old.slow != source.slow:
            self._seat(fork)

    def remove(self, instance_id: str) -> None:
        """Forget a member. Its fork, and those that read from it, are told of by other calls."""
        if instance_id in self.sources:
            self._take_down(instance_id)
            self._leave_layout(instance_id)
            del self.sources[instance_id]
        # Planned readers stay: it may have been silent only, and come back to them.
        self._greet(instance_id, ())
        del self._strangers[instance_id]
        if not self.readers[instance_id]:
            del self.readers[instance_id]
        self._missing.discard(instance_id)

    def follow(self, fork: ForkRecord) -> None:
        """A fork has a (new) plan."""
        target_id = fork.instance_id
        old = self._forks.get(target_id)
        if old is not None:
            self._unseat(old)
        self._forks[target_id] = fork
        peers = tuple(Share(read.source_id, read.chunks) for read in fork.reads)
        own = tuple(Share(target_id, read.chunks, read.kind == "loader") for read in fork.storage)
        self.shares[target_id] = peers + own
        self._elected.pop(target_id, None)
        if own:
            self._elected[target_id] = None
        if target_id not in self._missing:
            self._seat(fork)
        self._refresh(target_id)

    def leave(self, fork: ForkRecord) -> None:
        """A fork has ended."""
        target_id = fork.instance_id
        known = self._forks.get(target_id)
        if known is not None and known.fork_id == fork.fork_id:
            self._unseat(known)
            del self._forks[target_id]
            self.shares.pop(target_id, None)
            self._elected.pop(target_id, None)
            self._refresh(target_id)
            self.learn(fork)

    def learn(self, fork: ForkRecord) -> None:
        """What the end of a fork tells about those to come; nothing where it was given up."""
        if fork.finish is None or fork.lost:
            return
        self.count(fork, fork.finish)
        ran_loader = any(read.kind == "loader" for read in fork.storage)
        if ran_loader and fork.finish.outcome != "forked":
            self.alone = True

    def count(self, fork: ForkRecord, finish: ForkFinish) -> None:
        """A fork ended by itself: what it read counts, and how long it took."""
        self.durations.learn(fork, finish)
        for name, nbytes in finish.sources.items():
            if source_kind(name) == "peer":
                self.forked_bytes += nbytes
            else:
                self.storage_bytes += nbytes

    # -- what the policy sees -----------------------------------------------------------------------

    def view(self, demands: Sequence[Demand], other_ranks: tuple[str, ...] = ()) -> Group:
        """The group for these demands (of one layout, or of few): who gives, who reads, whom to look at."""
        layouts = dict.fromkeys(demand.target.layout_id for demand in demands)
        candidates: dict[str, None] = {}
        for layout_id in layouts:
            alike = [demand for demand in demands if demand.target.layout_id == layout_id]
            candidates.update(dict.fromkeys(self._candidates(layout_id, alike)))
        others = {name: len(members) for name, members in self._layouts.items() if name not in layouts}
        for name in others:
            candidates[min(list(self._layouts[name])[:ANY], key=self._worth)] = None
        held = [self.holders_of(layout_id) for layout_id in layouts]
        return Group(
            model=self.model,
            rank_key=self.rank_key,
            sources=self.sources,
            readers=self.readers,
            local=self.local,
            shares=self.shares,
            alone=self.alone,
            candidates=tuple(candidates),
            holders=held[0] if len(held) == 1 else None,
            other_layouts=others,
            other_ranks=other_ranks,
        )

    def holders_of(self, layout_id: str) -> dict[Content, Holders]:
        """Who holds what of a layout."""
        return self._holders.get(layout_id, {})

    @property
    def orphaned(self) -> bool:
        """Whether nobody is left to read these weights from, though somebody was and members are."""
        return self.seeded and not any(
            holders.seeds for held in self._holders.values() for holders in held.values()
        )

    def _candidates(self, layout_id: str, demands: Sequence[Demand]) -> Iterator[str]:
        """Members of a layout: who reads storage, and the best of each neighbourhood of the targets."""
        # Also those without a place: what they read nobody else has to.
        yield from [name for name in self._elected if self._holds(name, layout_id)][:ANY]
        contents = [content for name, content in self._shelves if name == layout_id]
        wanted: dict[Content, list[Demand]] = {}
        best = max(
            self._holders.get(layout_id, {}),
            key=lambda key: (self._holders[layout_id][key], key[0] or "", key[1] or ""),
            default=(None, None),
        )
        for demand in demands:
            target = demand.target
            begun = target.verified and (target.weights_id or target.draft)
            own = (target.weights_id, None) if target.weights_id else (None, target.draft)
            wanted.setdefault(own if begun else best, []).append(demand)
            for share in demand.current:
                yield share.source_id
        for content, alike in wanted.items():
            # A draft may be sealed by now, and who follows one by its plan alone has told nothing yet.
            # Where no seed gives what is wanted, others may be reading other files by now.
            sealed = self.holders_of(layout_id).get(content, Holders()).seeds
            fitting = [name for name in contents if name == content or name[0] is None or not sealed]
            for name in fitting:
                yield from self._nearby(self._shelves[layout_id, name], alike)
            if not fitting:
                for name in contents[:NEAR]:
                    yield from self._shelves[layout_id, name].best(("all",), 1)

    def _nearby(self, shelf: Shelf, demands: Sequence[Demand]) -> Iterator[str]:
        scopes = dict.fromkeys(scope for demand in demands for scope in scopes_of(demand.target.place))
        for scope in scopes:
            most = {"host": HOSTED, "all": ANY + len(demands)}.get(scope[0], NEAR)
            yield from shelf.best(scope, most)

    def _holds(self, instance_id: str, layout_id: str) -> bool:
        source = self.sources.get(instance_id)
        return source is not None and source.layout_id == layout_id

    def _worth(self, instance_id: str) -> tuple[bool, str]:
        return not self.sources[instance_id].complete, instance_id

    def _greet(self, instance_id: str, strangers: tuple[str, ...]) -> None:
        """Readers that nobody planned come and go."""
        readers, now = self.readers.setdefault(instance_id, {}), set(strangers)
        for name in self._strangers.get(instance_id, ()):
            if name not in now and readers.get(name) == STRANGER:
                del readers[name]
        for name in strangers:
            readers.setdefault(name, STRANGER)
        self._strangers[instance_id] = strangers

    def _miss(self, instance_id: str, missing: bool) -> None:
        """A member was found gone, or is there again."""
        fork = self._forks.get(instance_id)
        if missing:
            self._missing.add(instance_id)
            if fork is not None:
                self._unseat(fork)
        else:
            self._missing.discard(instance_id)
            if fork is not None:
                self._seat(fork)

    def _same_place(self, old: Source, new: Source) -> bool:
        """Whether a report changes nothing that the index goes by: most heartbeats do not."""
        told = [
            (each.layout_id, each.weights_id, each.draft, each.generation, each.state, each.complete,
             each.place, each.quarantine, each.slow, bool(each.verified))
            for each in (old, new)
        ]  # fmt: skip
        return told[0] == told[1] and self._places[old.instance_id][1] == self._bucket(new)

    # -- places -------------------------------------------------------------------------------------

    def _seat(self, fork: ForkRecord) -> None:
        total = sum(count(share.chunks) for share in self.shares[fork.instance_id])
        target = self.sources.get(fork.instance_id)
        speed = SLOW if target is not None and target.slow else 1.0
        for read in fork.reads:
            readers = self.readers.setdefault(read.source_id, {})
            readers[fork.fork_id] = speed * count(read.chunks) / total
            if takes_one_host(read.transports):
                self.local.setdefault(read.source_id, set()).add(fork.fork_id)
            if unknown := self._strangers.get(read.source_id):
                self._strangers[read.source_id] = tuple(name for name in unknown if name != fork.fork_id)
            self._refresh(read.source_id)

    def _unseat(self, fork: ForkRecord) -> None:
        for read in fork.reads:
            if (local := self.local.get(read.source_id)) is not None:
                local.discard(fork.fork_id)
                if not local:
                    del self.local[read.source_id]
            readers = self.readers.get(read.source_id)
            if readers is not None and readers.pop(fork.fork_id, None) is not None:
                self._refresh(read.source_id)
                if not readers and read.source_id not in self.sources:
                    del self.readers[read.source_id]

    def _refresh(self, instance_id: str) -> None:
        if instance_id in self.sources:
            self._take_down(instance_id)
            self._put_up(instance_id)

    def _put_up(self, instance_id: str) -> None:
        source = self.sources[instance_id]
        shelf = source.layout_id, self._content(source)
        bucket = self._bucket(source)
        self._places[instance_id] = shelf, bucket
        self._shelves.setdefault(shelf, Shelf()).add(source.place, bucket, instance_id)
        self._count(source, 1)

    def _take_down(self, instance_id: str) -> None:
        source = self.sources[instance_id]
        shelf, bucket = self._places.pop(instance_id)
        self._shelves[shelf].remove(source.place, bucket, instance_id)
        if not self._shelves[shelf].scopes:
            del self._shelves[shelf]
        self._count(source, -1)

    def _leave_layout(self, instance_id: str) -> None:
        layout_id = self.sources[instance_id].layout_id
        del self._layouts[layout_id][instance_id]
        if not self._layouts[layout_id]:
            del self._layouts[layout_id]

    def _content(self, source: Source) -> Content:
        """What the member holds, or is getting by its plan."""
        fork = self._forks.get(source.instance_id)
        if source.weights_id is not None or (
            fork is not None and fork.weights_id is not None and not source.draft
        ):
            return source.weights_id or (fork.weights_id if fork else None), None
        return None, source.draft or (fork.draft if fork else None)

    def _bucket(self, source: Source) -> Bucket:
        readers = self.readers.get(source.instance_id, {})
        local = self.local.get(source.instance_id, ())
        asked = sum(part for fork_id, part in readers.items() if fork_id not in local)
        load = min(60, math.ceil(4 * asked / source.weight - 0.01))
        missing = 0 if source.complete else 8 - 8 * source.watermark // max(1, source.chunk_count)
        return self._tier(source, len(readers)), load, not source.complete, missing

    def _tier(self, source: Source, readers: int) -> int:
        """0: can be read from; 1: slow, or by kernels on its GPU alone; 2: has no seat; 3: waits for nobody,
        or gives within its host alone; 4: is not to be read from.
        """
        if source.state == "draining" or source.quarantine or source.instance_id in self._missing:
            return 4
        if not source.complete and not self.shares.get(source.instance_id):
            return 3
        if only_one_host(source.transports):
            return 3
        if readers >= source.max_readers:
            return 2
        return 1 if (source.slow and not source.complete) or only_on_kernels(source.transports) else 0

    def _count(self, source: Source, change: int) -> None:
        key = (source.weights_id, None) if source.weights_id else (None, source.draft)
        if key == (None, None) or source.state == "draining" or source.quarantine or not source.verified:
            return
        held = self._holders.setdefault(source.layout_id, {})
        before = held.get(key, Holders())
        after = Holders(
            seeds=before.seeds + change * source.complete,
            instances=before.instances + change,
            generation=max(before.generation, source.generation),
        )
        if after.instances:
            held[key] = after
        else:
            del held[key]
            if not held:
                del self._holders[source.layout_id]
