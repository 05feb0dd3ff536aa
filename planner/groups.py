"""The index of one group: kept up to date by each change, so that a plan looks at a few members only.

The policy weighs sources by distance, load, completeness and progress. Here members lie in buckets by
just these, for each host, NVLink domain, rack and zone and for the whole group: a change moves one
member between buckets, and the best few of each neighbourhood are found without a look at the others.
What is coarse here (load in quarters, progress in eighths) only decides who is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from planner.fleet import SLOW, Demand, Group, Holders, Share, Source
from planner.holders import HolderCounts
from planner.past import Past
from planner.shelf import Bucket, Content, Shelf, bucket_of, scopes_of
from planner.slots import Slots
from rfork.image.ranges import count

if TYPE_CHECKING:
    from planner.store.records import ForkRecord, GroupKey

NEAR: Final = 4
"""Members of each neighbourhood of a target that a plan looks at."""
HOSTED: Final = 16
"""Members of a target's own host that a plan looks at: all of them, on most."""
ANY: Final = 12
"""Members of the whole group that a plan looks at, besides one for each target of the batch."""


class LiveGroup:
    """All members of one group, their forks, and who reads from whom."""

    def __init__(self, key: GroupKey, past: Past | None = None) -> None:
        """`past`: what is known of its forks from before; none: nothing."""
        self.key = key
        self.sources: dict[str, Source] = {}
        self.shares: dict[str, tuple[Share, ...]] = {}
        self._forks: dict[str, ForkRecord] = {}  # by target
        self._slots = Slots()
        self._missing: set[str] = set()
        self._elected: dict[str, None] = {}  # targets that read storage for all
        self._shelves: dict[tuple[str, Content], Shelf] = {}
        self._places: dict[str, tuple[tuple[str, Content], Bucket]] = {}
        self._holders = HolderCounts()
        self._layouts: dict[str, dict[str, None]] = {}
        self.past = Past() if past is None else past
        self.seeded = False
        """Whether somebody held the weights whole, at any time."""
        self.alone = False
        """Whether a loader was run here for all, and its instance gave nothing."""

    @property
    def model(self) -> str:
        """The model's name."""
        return self.key.model

    @property
    def version(self) -> str:
        """The version of the weights; empty for targets whose version is not settled yet."""
        return self.key.version

    @property
    def rank_key(self) -> str:
        """The rank."""
        return self.key.rank_key

    @property
    def readers(self) -> Mapping[str, Mapping[str, float]]:
        """By instance_id: the forks that read from it (see `planner.slots.Slots`)."""
        return self._slots.readers

    # -- changes ----------------------------------------------------------------------------------

    def put(self, source: Source, *, missing: bool = False, strangers: Sequence[str] = ()) -> None:
        """Add a member, or replace it. `missing`: a reader found it gone, so its own reads do not count.
        `strangers`: forks that read from it and that nobody planned.
        """
        instance_id, old = source.instance_id, self.sources.get(source.instance_id)
        same = missing == (instance_id in self._missing)
        same = same and self._slots.strangers(instance_id) == tuple(strangers)
        if same and old is not None and self._same_place(old, source):
            self.sources[instance_id] = source
            return
        if old is not None:
            self._take_down(instance_id)
            if source.layout_id != old.layout_id:
                self._leave_layout(instance_id)
        self.sources[instance_id] = source
        self._layouts.setdefault(source.layout_id, {})[instance_id] = None
        self._slots.greet(instance_id, tuple(strangers))
        if missing != (instance_id in self._missing):
            self._miss(instance_id, missing)
        self._put_up(instance_id)
        self.alone = self.alone and not source.complete
        self.seeded = self.seeded or source.complete
        fork = self._forks.get(instance_id)
        if fork is not None and not missing and old is not None and old.slow != source.slow:
            self._take_slots(fork)

    def remove(self, instance_id: str) -> None:
        """Forget a member. Its fork, and those that read from it, are told of by other calls."""
        if instance_id in self.sources:
            self._take_down(instance_id)
            self._leave_layout(instance_id)
            del self.sources[instance_id]
        self._slots.dismiss(instance_id)
        self._missing.discard(instance_id)

    def follow(self, fork: ForkRecord) -> None:
        """A fork has a (new) plan."""
        target_id = fork.instance_id
        old = self._forks.get(target_id)
        if old is not None:
            self._release_slots(old)
        self._forks[target_id] = fork
        peers = tuple(Share(read.source_id, read.chunks) for read in fork.reads)
        own = tuple(Share(target_id, read.chunks, read.kind == "loader") for read in fork.storage)
        self.shares[target_id] = peers + own
        self._elected.pop(target_id, None)
        if own:
            self._elected[target_id] = None
        if target_id not in self._missing:
            self._take_slots(fork)
        self._refresh(target_id)

    def leave(self, fork: ForkRecord) -> None:
        """A fork has ended."""
        target_id = fork.instance_id
        known = self._forks.get(target_id)
        if known is not None and known.fork_id == fork.fork_id:
            self._release_slots(known)
            del self._forks[target_id]
            self.shares.pop(target_id, None)
            self._elected.pop(target_id, None)
            self._refresh(target_id)
            self.learn(fork)

    def learn(self, fork: ForkRecord) -> None:
        """What the end of a fork tells about those to come; nothing where it was given up."""
        if fork.finish is None or fork.lost:
            return
        self.past.count(fork, fork.finish)
        ran_loader = any(read.kind == "loader" for read in fork.storage)
        if ran_loader and fork.finish.outcome != "forked":
            self.alone = True

    # -- what the policy sees -----------------------------------------------------------------------

    def view(
        self,
        demands: Sequence[Demand],
        other_ranks: tuple[str, ...] = (),
        *,
        other_versions: Mapping[str, int] | None = None,
        together: int = 0,
    ) -> Group:
        """The group for these demands (of one layout, or of few): who gives, who reads, whom to look at.

        `together`: so many come in all; those that are not told differ from these by their hosts, on which
        nobody is.
        """
        layouts = dict.fromkeys(demand.target.layout_id for demand in demands)
        candidates: dict[str, None] = {}
        for layout_id in layouts:
            alike = [demand for demand in demands if demand.target.layout_id == layout_id]
            candidates.update(dict.fromkeys(self._candidates(layout_id, alike, together)))
        others = {name: len(members) for name, members in self._layouts.items() if name not in layouts}
        for name in others:
            candidates[min(list(self._layouts[name])[:ANY], key=self._worth)] = None
        held = [self.holders_of(layout_id) for layout_id in layouts]
        return Group(
            model=self.model,
            rank_key=self.rank_key,
            sources=self.sources,
            readers=self._slots.readers,
            local=self._slots.local,
            shares=self.shares,
            alone=self.alone,
            candidates=tuple(candidates),
            holders=held[0] if len(held) == 1 else None,
            other_layouts=others,
            other_ranks=other_ranks,
            version=self.version,
            other_versions=other_versions or {},
        )

    def holders_of(self, layout_id: str) -> Mapping[Content, Holders]:
        """Who holds what of a layout."""
        return self._holders.of(layout_id)

    @property
    def orphaned(self) -> bool:
        """Return whether members are left and no source, though there was one.

        A group whose last members drain does not count: they shut down, as in a rollout of another version.
        """
        if not self.seeded or self._holders.any_seed:
            return False
        return any(source.state != "draining" for source in self.sources.values())

    def _candidates(self, layout_id: str, demands: Sequence[Demand], together: int) -> Iterator[str]:
        """Members of a layout: who reads storage, and the best of each neighbourhood of the targets."""
        # Also those without a free slot: what they read nobody else has to.
        yield from [name for name in self._elected if self._holds(name, layout_id)][:ANY]
        contents = [content for name, content in self._shelves if name == layout_id]
        wanted: dict[Content, list[Demand]] = {}
        held = self._holders.of(layout_id)
        best = max(held, key=lambda key: (held[key], key[0] or "", key[1] or ""), default=(None, None))
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
            sealed = held.get(content, Holders()).seeds
            fitting = [name for name in contents if name == content or name[0] is None or not sealed]
            for name in fitting:
                yield from self._nearby(self._shelves[layout_id, name], alike, max(len(alike), together))
            if not fitting:
                for name in contents[:NEAR]:
                    yield from self._shelves[layout_id, name].best(("all",), 1)

    def _nearby(self, shelf: Shelf, demands: Sequence[Demand], together: int) -> Iterator[str]:
        scopes = dict.fromkeys(scope for demand in demands for scope in scopes_of(demand.target.place))
        for scope in scopes:
            most = {"host": HOSTED, "all": ANY + together}.get(scope[0], NEAR)
            yield from shelf.best(scope, most)

    def _holds(self, instance_id: str, layout_id: str) -> bool:
        source = self.sources.get(instance_id)
        return source is not None and source.layout_id == layout_id

    def _worth(self, instance_id: str) -> tuple[bool, str]:
        return not self.sources[instance_id].complete, instance_id

    def _miss(self, instance_id: str, missing: bool) -> None:
        """A member was found gone, or is there again."""
        fork = self._forks.get(instance_id)
        if missing:
            self._missing.add(instance_id)
            if fork is not None:
                self._release_slots(fork)
        else:
            self._missing.discard(instance_id)
            if fork is not None:
                self._take_slots(fork)

    def _same_place(self, old: Source, new: Source) -> bool:
        """Whether a report changes nothing that the index goes by: most heartbeats do not."""
        told = [
            (each.layout_id, each.weights_id, each.draft, each.generation, each.state, each.complete,
             each.place, each.quarantine, each.slow, bool(each.verified))
            for each in (old, new)
        ]  # fmt: skip
        return told[0] == told[1] and self._places[old.instance_id][1] == self._bucket(new)

    # -- slots and shelves ----------------------------------------------------------------------------

    def _take_slots(self, fork: ForkRecord) -> None:
        target = self.sources.get(fork.instance_id)
        chunks = sum(count(share.chunks) for share in self.shares[fork.instance_id])
        self._slots.take(fork, chunks, SLOW if target is not None and target.slow else 1.0)
        for read in fork.reads:
            self._refresh(read.source_id)

    def _release_slots(self, fork: ForkRecord) -> None:
        for source_id in self._slots.release(fork):
            self._refresh(source_id)

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
        self._holders.add(source)

    def _take_down(self, instance_id: str) -> None:
        source = self.sources[instance_id]
        shelf, bucket = self._places.pop(instance_id)
        self._shelves[shelf].remove(source.place, bucket, instance_id)
        if not self._shelves[shelf].scopes:
            del self._shelves[shelf]
        self._holders.remove(source)

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
        instance_id = source.instance_id
        return bucket_of(
            source,
            readers=len(self._slots.readers.get(instance_id, ())),
            load=self._slots.load(instance_id),
            fed=bool(self.shares.get(instance_id)),
            gone=instance_id in self._missing,
        )
