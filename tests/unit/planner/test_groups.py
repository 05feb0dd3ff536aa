from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.fleet import Decision, Demand, Group, Place, Share, Source
from planner.groups import ANY, LiveGroup
from planner.policy import holders, plan
from planner.store.records import ForkRecord, GroupKey, Read
from rfork.image.ranges import Range, from_indices, indices, intersect, normalise
from rfork.wire import ForkFinish, Rank, StorageRead
from tests.unit.planner.audit import covered, violations
from tests.unit.planner.builders import (
    CHECKPOINT,
    CHUNKS,
    LAYOUT,
    NOW,
    ORIGIN,
    OTHER_LAYOUT,
    VERSION,
    WEIGHTS,
    demand,
    loading,
    seed,
)
from tests.unit.planner.test_policy_properties import Lots

ALL = ((0, CHUNKS),)
LOCAL = ("shared_memory", "http")


def record(target: str, reads: dict[str, tuple[Range, ...]], **changes: object) -> ForkRecord:
    """The running fork of a target; reads from itself are reads from its checkpoint."""
    peers = tuple(Read(name, chunks, ("http",), 0) for name, chunks in reads.items() if name != target)
    own = tuple(
        StorageRead(kind="checkpoint", chunks=chunks) for name, chunks in reads.items() if name == target
    )
    fork = ForkRecord(
        fork_id=f"fork-{target}", instance_id=target, model="m", rank=Rank(), chunk_count=CHUNKS,
        image_bytes=CHUNKS, asked_at=0, planned_at=0, seen_at=0, reads=peers, storage=own,
    )  # fmt: skip
    return replace(fork, **changes)  # type: ignore[arg-type]  # each test names fields of ForkRecord


def live(*sources: Source, forks: Sequence[ForkRecord] = (), missing: Sequence[str] = ()) -> LiveGroup:
    """The index of these members, built in one go."""
    made = LiveGroup(GroupKey("m", VERSION, "r"))
    for source in sources:
        made.put(source, missing=source.instance_id in missing)
    for fork in forks:
        made.follow(fork)
    return made


class Walk:
    """A fleet that lives: what was told of it, and the index that was told so."""

    def __init__(self, lots: Lots, seeds: int) -> None:
        self.lots = lots
        self.index = LiveGroup(GroupKey("m", VERSION, "r"))
        self.sources: dict[str, Source] = {}
        self.forks: dict[str, ForkRecord] = {}
        self.missing: set[str] = set()
        self.draft = None if seeds else ORIGIN
        for number in range(seeds):
            self._put(seed(f"s{number}", place=self._place(f"s{number}"), max_readers=lots.randrange(1, 4)))

    def step(self) -> None:
        """Something happens."""
        steps = [self.arrive, self.arrive, self.progress, self.progress, self.progress, self.die, self.drain,
                 self.vanish, self.ask_again]  # fmt: skip
        self.lots.choice(steps)()

    def arrive(self) -> None:
        """Some come together."""
        came: list[Demand] = []
        for _ in range(self.lots.randrange(1, 8)):
            name = f"t{len(self.sources) + len(came):03}-{self.lots.randrange(1000)}"
            storage = () if self.draft is None and self.lots.random() < 0.7 else (CHECKPOINT,)
            most = self.lots.randrange(1, 5)
            came.append(demand(loading(name, place=self._place(name), max_readers=most, storage=storage)))
        self.plan(came)

    def progress(self) -> None:
        """All that can read get some of what their sources hold; who has everything serves."""
        for name, fork in list(self.forks.items()):
            if name in self.missing:
                continue  # it is gone indeed
            target = self.sources[name]
            got = list(target.verified)
            for share in self.index.shares[name]:
                source = self.sources.get(share.source_id)
                whole = share.source_id == name
                there = ALL if whole else source.verified if source is not None else ()
                ready = list(indices(intersect(share.chunks, there)))
                got += from_indices(ready[: self.lots.randrange(len(ready) + 1)])
            weights_id = WEIGHTS if got and self.draft is None else None
            target = replace(
                target, verified=normalise(got), weights_id=weights_id, draft=self.draft if got else None
            )
            if target.verified == ALL:
                target = replace(target, weights_id=WEIGHTS, state="serving")
                self.index.leave(replace(fork, finish=ForkFinish(outcome="forked", seconds=1, bytes_read=1)))
                del self.forks[name]
            self._put(target)

    def die(self) -> None:
        """Somebody is forgotten, with its fork; its readers ask again."""
        if not self.sources:
            return
        name = self.lots.choice(sorted(self.sources))
        if name in self.forks:
            self.index.leave(self.forks.pop(name))
        self.index.remove(name)
        del self.sources[name]
        self.missing.discard(name)
        self._orphans(name)

    def vanish(self) -> None:
        """A reader finds a relay gone before the planner has forgotten it."""
        if self.forks:
            name = self.lots.choice(sorted(self.forks))
            self.missing.add(name)
            self._put(self.sources[name])
            self._orphans(name)

    def drain(self) -> None:
        """Somebody that serves takes no new readers."""
        if serving := sorted(name for name, source in self.sources.items() if source.complete):
            self._put(replace(self.sources[self.lots.choice(serving)], state="draining"))

    def ask_again(self) -> None:
        """A fork asks for a better plan."""
        if self.forks:
            name = self.lots.choice(sorted(self.forks))
            self.plan([demand(self.sources[name], *self.index.shares[name])])

    def plan(self, demands: list[Demand]) -> None:
        """Plan from the shortlist, see that it does as well as a small group, and follow the plan."""
        view = self.index.view(demands)
        whole = replace(view, candidates=None, holders=None)
        decisions, full = plan(view, demands, NOW), plan(whole, demands, NOW)
        assert [] == violations(whole, demands, decisions, NOW)
        # Who was found gone is known to the index alone: from then on it may well choose otherwise.
        if len(self.sources) <= ANY and not self.missing:
            assert {fork_id: covered(each) for fork_id, each in full.items()} == {
                fork_id: covered(each) for fork_id, each in decisions.items()
            }
        for each in demands:
            self.missing.discard(each.target.instance_id)
            self._put(each.target)
            self._follow(each, decisions[each.fork_id])

    def _follow(self, asked: Demand, decision: Decision) -> None:
        name = asked.target.instance_id
        reads = {share.source_id: share.chunks for share in decision.shares}
        if decision.storage:
            reads[name] = normalise(chunk for _, chunks in decision.storage for chunk in chunks)
        self.forks[name] = record(name, reads, weights_id=decision.weights_id, draft=decision.draft)
        self.index.follow(self.forks[name])

    def _orphans(self, gone: str) -> None:
        for name in sorted(self.forks):
            if gone in {read.source_id for read in self.forks[name].reads}:
                self.plan([demand(self.sources[name], *self.index.shares[name], **{gone: "SourceGone"})])

    def _put(self, source: Source) -> None:
        self.sources[source.instance_id] = source
        self.index.put(source, missing=source.instance_id in self.missing)

    def _place(self, name: str) -> Place:
        rack = self.lots.choice(("r1", "r2", None))
        return Place(self.lots.choice((f"h-{name}", f"h-{name}", "h1")), rack, self.lots.choice(("z1", "z2")))


def circles(group: Group) -> list[tuple[str, int]]:
    """Targets and chunks that lead back to themselves."""
    found: list[tuple[str, int]] = []
    for chunk in range(CHUNKS):
        parent = {
            name: share.source_id
            for name, shares in group.shares.items()
            for share in shares
            if share.source_id != name and any(begin <= chunk < end for begin, end in share.chunks)
        }
        for name in parent:
            at, links = parent[name], 0
            while at != name and at in parent and links <= len(parent):
                at, links = parent[at], links + 1
            if at == name:
                found.append((name, chunk))
    return found


@given(st.integers(0, 2**32).map(Lots), st.integers(0, 3), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_a_fleet_that_plans_alone_built(lots: Lots, seeds: int, steps: int) -> None:
    """Whatever happens, in any order: no circles, nobody over capacity, and the index is as if made anew."""
    walk = Walk(lots, seeds)
    for _ in range(steps):
        walk.step()
        view = walk.index.view([demand(loading("probe"))])
        anew = live(*walk.sources.values(), forks=list(walk.forks.values()), missing=list(walk.missing))
        assert [] == circles(view)
        assert {name: readers for name, readers in anew.readers.items() if readers} == {
            name: readers for name, readers in walk.index.readers.items() if readers
        }
        assert anew.shares == walk.index.shares
        assert anew._places == walk.index._places
        assert holders(list(walk.sources.values()), NOW) == walk.index.holders_of(LAYOUT)
        assert [] == [
            name
            for name, source in walk.sources.items()
            if len(walk.index.readers[name]) > source.max_readers
        ]


def test_an_empty_group_shows_nobody() -> None:
    """No candidates, no holders."""
    view = LiveGroup(GroupKey("m", VERSION, "r")).view([demand(loading("t"))])
    assert ((), {}, {}) == (view.candidates, view.holders, view.other_layouts)


def test_the_shortlist_stays_short() -> None:
    """Of two thousand seeds a plan looks at a few, and one of them is on the target's host."""
    members = [seed(f"s{index:04}", place=Place(f"h{index}", f"r{index % 40}", "z")) for index in range(2000)]
    view = live(*members).view([demand(loading("t", place=Place("h1234", "r34", "z")))])
    assert view.candidates is not None
    assert len(view.candidates) < 60
    assert "s1234" in view.candidates


def test_one_may_stand_for_many_that_come_with_it() -> None:
    """As many are looked at as for all of them, and the same ones, where nobody is on their hosts."""
    members = [seed(f"s{index:04}", place=Place(f"h{index}", f"r{index % 40}", "z")) for index in range(300)]
    coming = [demand(loading(f"t{index}", place=Place(f"new-{index}", "r3", "z"))) for index in range(100)]
    index = live(*members)
    assert index.view(coming).candidates == index.view(coming[:1], together=len(coming)).candidates


def test_who_cannot_be_read_from_does_not_hide_who_can() -> None:
    """A thousand that drain, are full or wait for nobody, and one seed with a free slot."""
    members = [seed(f"a{index:04}", state="draining") for index in range(500)]
    members += [seed(f"b{index:04}", max_readers=0) for index in range(500)]
    members += [loading(f"c{index:04}") for index in range(500)]
    asked = demand(loading("t"))
    decision = plan(live(*members, seed("z")).view([asked]), [asked], NOW)["fork-t"]
    assert [Share("z", ALL)] == list(decision.shares)


def test_one_of_another_layout_is_shown_to_compare_with() -> None:
    """With how many there are."""
    members = [loading(f"a{index}", layout_id=OTHER_LAYOUT) for index in range(3)]
    members.append(seed("z", layout_id=OTHER_LAYOUT))
    view = live(*members).view([demand(loading("t"))])
    assert (("z",), {OTHER_LAYOUT: 4}) == (view.candidates, view.other_layouts)


def test_readers_that_nobody_planned_take_slots_until_they_are_gone() -> None:
    """A seed's report names them; the next one does not."""
    index = LiveGroup(GroupKey("m", VERSION, "r"))
    index.put(seed("s"), strangers=("x", "y"))
    before = set(index.readers["s"])
    index.put(seed("s"), strangers=("y",))
    assert ({"x", "y"}, {"y"}) == (before, set(index.readers["s"]))


def test_a_stranger_that_asks_is_a_reader_like_others() -> None:
    """Even where it reads half from there, as strangers are taken to."""
    index = LiveGroup(GroupKey("m", VERSION, "r"))
    index.put(seed("s"), strangers=("fork-t",))
    index.put(loading("t"))
    index.follow(record("t", {"s": ((0, 6),), "u": ((6, 12),)}))
    index.put(seed("s"))
    assert {"fork-t": 0.5} == index.readers["s"]


def test_a_source_that_was_silent_comes_back_to_its_readers() -> None:
    """Their slots are still taken."""
    index = live(seed("s"), loading("t"), forks=[record("t", {"s": ALL})])
    index.remove("s")
    index.put(seed("s"))
    assert {"fork-t": 1.0} == index.readers["s"]


def test_what_forks_read_is_counted_when_they_end() -> None:
    """From storage, and from one another."""
    index = live(seed("s"), loading("t"), forks=[record("t", {"s": ALL})])
    finish = ForkFinish(
        outcome="forked", seconds=1, bytes_read=9, sources={"s": 5, "checkpoint:file:///c": 4}
    )
    index.leave(record("t", {}, finish=finish))
    index.leave(record("t", {}, finish=finish))
    assert (4, 5, {}) == (index.past.storage_bytes, index.past.forked_bytes, index.readers["s"])


def test_a_group_is_orphaned_once_its_last_seed_is_gone() -> None:
    """Not before it had one, and not while another is left."""
    index, told = live(loading("t")), list[bool]()
    for change in (
        lambda: None,
        lambda: index.put(seed("s")),
        lambda: index.put(seed("u")),
        lambda: index.remove("s"),
        lambda: index.put(seed("u", state="draining")),
        lambda: index.put(seed("t")),
    ):
        change()
        told.append(index.orphaned)
    assert [False, False, False, False, True, False] == told


def test_a_group_that_drains_as_a_whole_is_not_orphaned() -> None:
    """So ends the version before, in a rollout of another one."""
    index = live(seed("s"), seed("u"))
    index.put(seed("s", state="draining"))
    index.put(seed("u", state="draining"))
    assert not index.orphaned
    index.put(loading("t"))
    assert index.orphaned


def test_a_loader_that_made_no_seed_is_remembered_until_a_seed_comes() -> None:
    """Its fork ended as a fallback: the group's loaders are run by each for itself."""
    finish = ForkFinish(outcome="fallback", seconds=1, bytes_read=0)
    reads = (StorageRead(kind="loader", chunks=ALL),)
    index = live(loading("t"), forks=[record("t", {}, storage=reads)])
    index.leave(record("t", {}, storage=reads, finish=finish))
    before = index.alone
    index.put(seed("s"))
    assert (True, False) == (before, index.alone)


def test_readers_within_a_host_are_told_from_others() -> None:
    """By the transport that their plan tries first; one that leaves is neither."""
    reads = {name: Read("s", ALL, transports, 0) for name, transports in (("t", LOCAL), ("u", ("http",)))}
    index = live(
        seed("s", transports=LOCAL),
        *(loading(name) for name in reads),
        forks=[replace(record(name, {}), reads=(read,)) for name, read in reads.items()],
    )
    during = {name: set(forks) for name, forks in index.view(()).local.items()}
    index.leave(record("t", {}))
    assert ({"s": {"fork-t"}}, {}, {"fork-u": 1.0}) == (during, index.view(()).local, index.readers["s"])


def test_a_source_for_its_own_host_alone_hides_no_other() -> None:
    """Of more instances than a plan looks at, the one that can be read from is found."""
    bound = [seed(f"a{number:02}", transports=("shared_memory",)) for number in range(3 * ANY)]
    index, asked = live(*bound, seed("z", transports=LOCAL)), demand(loading("t", transports=LOCAL))
    assert [("z", ("http",))] == [
        (each.source_id, each.transports)
        for each in plan(index.view([asked]), [asked], NOW)[asked.fork_id].assignments
    ]
