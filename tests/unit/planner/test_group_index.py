"""The index of a group: candidates, readers and orphaned groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.group_index import MAX_ANYWHERE, Bucket, Content, GroupIndex, Scope
from planner.core.records import ForkRecord, GroupKey, RouteRecord
from planner.policy.group_plan import count_contents, plan
from planner.policy.types import ChunkShare, ForkDemand, GroupView, HostLocation, PlanDecision, Source
from rfork.image.ranges import Range, from_indices, indices, intersect, normalise
from rfork.schema import ForkResult, Rank, StorageAssignment
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
from tests.unit.planner.policy.invariants import covered, violations
from tests.unit.planner.policy.test_properties import SeededRandom

ALL = ((0, CHUNKS),)
LOCAL = ("shared_memory", "http")


def record(target: str, reads: dict[str, tuple[Range, ...]], **changes: object) -> ForkRecord:
    """Return the running fork of a target; reads from itself are reads from its checkpoint."""
    peers = tuple(RouteRecord(name, chunks, ("http",), 0) for name, chunks in reads.items() if name != target)
    own = tuple(StorageAssignment(kind="checkpoint", chunks=chunks) for name, chunks in reads.items() if name == target)
    fork = ForkRecord(
        fork_id=f"fork-{target}", instance_id=target, model="m", rank=Rank(), chunk_count=CHUNKS,
        image_bytes=CHUNKS, requested_at=0, planned_at=0, seen_at=0, reads=peers, storage=own,
    )  # fmt: skip
    return replace(fork, **changes)  # type: ignore[arg-type]  # each test names fields of ForkRecord


def build_index(*sources: Source, forks: Sequence[ForkRecord] = (), missing: Sequence[str] = ()) -> GroupIndex:
    """Return an index of these members, built from scratch."""
    made = GroupIndex(GroupKey("m", VERSION, "r"))
    for source in sources:
        made.put(source, missing=source.instance_id in missing)
    for fork in forks:
        made.apply_plan(fork)
    return made


class GroupSimulation:
    """A changing fleet, with the index that is updated incrementally."""

    def __init__(self, rng: SeededRandom, seeds: int) -> None:
        self.rng = rng
        self.index = GroupIndex(GroupKey("m", VERSION, "r"))
        self.sources: dict[str, Source] = {}
        self.forks: dict[str, ForkRecord] = {}
        self.missing: set[str] = set()
        self.provisional_id = None if seeds else ORIGIN
        for number in range(seeds):
            self._put(
                seed(
                    f"s{number}",
                    location=self._random_placement(f"s{number}"),
                    max_readers=rng.randrange(1, 4),
                )
            )

    def step(self) -> None:
        """Run one random event."""
        steps = [self.arrive, self.arrive, self.progress, self.progress, self.progress, self.die, self.drain,
                 self.vanish, self.replan]  # fmt: skip
        self.rng.choice(steps)()

    def arrive(self) -> None:
        """Let some targets arrive together."""
        arrivals: list[ForkDemand] = []
        for _ in range(self.rng.randrange(1, 8)):
            name = f"t{len(self.sources) + len(arrivals):03}-{self.rng.randrange(1000)}"
            storage = () if self.provisional_id is None and self.rng.random() < 0.7 else (CHECKPOINT,)
            max_readers = self.rng.randrange(1, 5)
            arrivals.append(
                demand(loading(name, location=self._random_placement(name), max_readers=max_readers, storage=storage))
            )
        self.plan(arrivals)

    def progress(self) -> None:
        """Let all readers receive chunks of their sources; complete targets start serving."""
        for name, fork in list(self.forks.items()):
            if name in self.missing:
                continue  # it is really removed
            target = self.sources[name]
            got = list(target.verified)
            for share in self.index.shares[name]:
                source = self.sources.get(share.source_id)
                from_own_storage = share.source_id == name
                there = ALL if from_own_storage else source.verified if source is not None else ()
                ready = list(indices(intersect(share.chunks, there)))
                got += from_indices(ready[: self.rng.randrange(len(ready) + 1)])
            weights_id = WEIGHTS if got and self.provisional_id is None else None
            target = replace(
                target,
                verified=normalise(got),
                weights_id=weights_id,
                provisional_id=self.provisional_id if got else None,
            )
            if target.verified == ALL:
                target = replace(target, weights_id=WEIGHTS, state="serving")
                self.index.end_fork(replace(fork, finish=ForkResult(outcome="forked", seconds=1, bytes_read=1)))
                del self.forks[name]
            self._put(target)

    def die(self) -> None:
        """Remove an instance with its fork; its readers replan."""
        if not self.sources:
            return
        name = self.rng.choice(sorted(self.sources))
        if name in self.forks:
            self.index.end_fork(self.forks.pop(name))
        self.index.remove(name)
        del self.sources[name]
        self.missing.discard(name)
        self._orphans(name)

    def vanish(self) -> None:
        """Let a reader report a relay as missing before the planner has forgotten it."""
        if self.forks:
            name = self.rng.choice(sorted(self.forks))
            self.missing.add(name)
            self._put(self.sources[name])
            self._orphans(name)

    def drain(self) -> None:
        """Drain a serving instance."""
        if serving := sorted(name for name, source in self.sources.items() if source.complete):
            self._put(replace(self.sources[self.rng.choice(serving)], state="draining"))

    def replan(self) -> None:
        """Let a fork replan."""
        if self.forks:
            name = self.rng.choice(sorted(self.forks))
            self.plan([demand(self.sources[name], *self.index.shares[name])])

    def plan(self, demands: list[ForkDemand]) -> None:
        """Plan from the candidates, compare with a plan over all members, and apply the plan."""
        view = self.index.view(demands)
        full_view = replace(view, candidates=None, content_counts=None)
        decisions, full = plan(view, demands, NOW), plan(full_view, demands, NOW)
        assert [] == violations(full_view, demands, decisions, NOW)
        # Only the index knows which instances are missing, so decisions may differ from then on.
        if len(self.sources) <= MAX_ANYWHERE and not self.missing:
            assert {fork_id: covered(each) for fork_id, each in full.items()} == {
                fork_id: covered(each) for fork_id, each in decisions.items()
            }
        for each in demands:
            self.missing.discard(each.target.instance_id)
            self._put(each.target)
            self._apply_plan(each, decisions[each.fork_id])

    def _apply_plan(self, fork_demand: ForkDemand, decision: PlanDecision) -> None:
        name = fork_demand.target.instance_id
        reads = {share.source_id: share.chunks for share in decision.shares}
        if decision.storage:
            reads[name] = normalise(chunk for _, chunks in decision.storage for chunk in chunks)
        self.forks[name] = record(name, reads, weights_id=decision.weights_id, provisional_id=decision.provisional_id)
        self.index.apply_plan(self.forks[name])

    def _orphans(self, removed: str) -> None:
        for name in sorted(self.forks):
            if removed in {read.source_id for read in self.forks[name].reads}:
                self.plan([demand(self.sources[name], *self.index.shares[name], **{removed: "SourceUnavailable"})])

    def _put(self, source: Source) -> None:
        self.sources[source.instance_id] = source
        self.index.put(source, missing=source.instance_id in self.missing)

    def _random_placement(self, name: str) -> HostLocation:
        rack = self.rng.choice(("r1", "r2", None))
        return HostLocation(self.rng.choice((f"h-{name}", f"h-{name}", "h1")), rack, self.rng.choice(("z1", "z2")))


def buckets_of(index: GroupIndex) -> dict[tuple[str, Content], dict[Scope, dict[Bucket, dict[str, None]]]]:
    """Return the members in each bucket of each locality."""
    return {key: buckets.scopes for key, buckets in index._buckets_by_layout.items()}


def find_cycles(group: GroupView) -> list[tuple[str, int]]:
    """Return targets and chunks that form a cycle."""
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


@given(st.integers(0, 2**32).map(SeededRandom), st.integers(0, 3), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_random_fleets_have_no_cycles_and_a_consistent_index(rng: SeededRandom, seeds: int, steps: int) -> None:
    """After random events there are no cycles and no overload, and the index equals one built from scratch."""
    simulation = GroupSimulation(rng, seeds)
    for _ in range(steps):
        simulation.step()
        view = simulation.index.view([demand(loading("probe"))])
        rebuilt = build_index(
            *simulation.sources.values(),
            forks=list(simulation.forks.values()),
            missing=list(simulation.missing),
        )
        assert [] == find_cycles(view)
        assert rebuilt.readers == simulation.index.readers
        assert rebuilt.shares == simulation.index.shares
        assert rebuilt._bucket_of_member == simulation.index._bucket_of_member
        assert buckets_of(rebuilt) == buckets_of(simulation.index)
        assert sum(source.complete for source in simulation.sources.values()) == simulation.index.complete_count
        assert count_contents(list(simulation.sources.values()), NOW) == simulation.index.content_counts(LAYOUT)
        assert [] == [
            name
            for name, source in simulation.sources.items()
            if len(simulation.index.readers.get(name, ())) > source.max_readers
        ]


def test_an_empty_group_has_no_candidates() -> None:
    """It has no holders either."""
    view = GroupIndex(GroupKey("m", VERSION, "r")).view([demand(loading("t"))])
    assert () == view.candidates
    assert {} == view.content_counts
    assert {} == view.other_layouts


def test_the_candidates_are_few() -> None:
    """Of two thousand seeds a plan considers a few, including one on the target's host."""
    members = [seed(f"s{index:04}", location=HostLocation(f"h{index}", f"r{index % 40}", "z")) for index in range(2000)]
    view = build_index(*members).view([demand(loading("t", location=HostLocation("h1234", "r34", "z")))])
    assert view.candidates is not None
    assert len(view.candidates) < 60
    assert "s1234" in view.candidates


def test_one_demand_represents_similar_ones() -> None:
    """The candidates are the same as for all of them, if their hosts have no members."""
    members = [seed(f"s{index:04}", location=HostLocation(f"h{index}", f"r{index % 40}", "z")) for index in range(300)]
    coming = [demand(loading(f"t{index}", location=HostLocation(f"new-{index}", "r3", "z"))) for index in range(100)]
    index = build_index(*members)
    assert index.view(coming).candidates == index.view(coming[:1], together=len(coming)).candidates


def test_unusable_members_do_not_hide_usable_ones() -> None:
    """A seed with a free slot is found among a thousand draining, full or unfed members."""
    members = [seed(f"a{index:04}", state="draining") for index in range(500)]
    members += [seed(f"b{index:04}", max_readers=0) for index in range(500)]
    members += [loading(f"c{index:04}") for index in range(500)]
    fork_demand = demand(loading("t"))
    decision = plan(build_index(*members, seed("z")).view([fork_demand]), [fork_demand], NOW)["fork-t"]
    assert [ChunkShare("z", ALL)] == list(decision.shares)


def test_one_member_of_another_layout_is_a_candidate() -> None:
    """The number of members with that layout is included."""
    members = [loading(f"a{index}", layout_id=OTHER_LAYOUT) for index in range(3)]
    members.append(seed("z", layout_id=OTHER_LAYOUT))
    view = build_index(*members).view([demand(loading("t"))])
    assert ("z",) == view.candidates
    assert {OTHER_LAYOUT: 4} == view.other_layouts


def test_unplanned_readers_occupy_slots_until_they_leave() -> None:
    """A seed's report names them; the next one does not."""
    index = GroupIndex(GroupKey("m", VERSION, "r"))
    index.put(seed("s"), unplanned_readers=("x", "y"))
    before = set(index.readers["s"])
    index.put(seed("s"), unplanned_readers=("y",))
    assert {"x", "y"} == before
    assert {"y"} == set(index.readers["s"])


def test_an_unplanned_reader_that_gets_a_plan_is_counted_normally() -> None:
    """This holds even if it reads exactly the assumed share."""
    index = GroupIndex(GroupKey("m", VERSION, "r"))
    index.put(seed("s"), unplanned_readers=("fork-t",))
    index.put(loading("t"))
    index.apply_plan(record("t", {"s": ((0, 6),), "u": ((6, 12),)}))
    index.put(seed("s"))
    assert {"fork-t": 0.5} == index.readers["s"]


def test_a_returning_source_keeps_its_readers() -> None:
    """Their slots are still occupied."""
    index = build_index(seed("s"), loading("t"), forks=[record("t", {"s": ALL})])
    index.remove("s")
    index.put(seed("s"))
    assert {"fork-t": 1.0} == index.readers["s"]


def test_bytes_are_counted_when_forks_end() -> None:
    """Storage and peers are counted separately."""
    index = build_index(seed("s"), loading("t"), forks=[record("t", {"s": ALL})])
    finish = ForkResult(outcome="forked", seconds=1, bytes_read=9, sources={"s": 5, "checkpoint:file:///c": 4})
    index.end_fork(record("t", {}, finish=finish))
    index.end_fork(record("t", {}, finish=finish))
    assert 4 == index.history.storage_bytes
    assert 5 == index.history.forked_bytes
    assert {} == index.readers


def test_a_group_is_orphaned_without_its_last_seed() -> None:
    """It is not before its first seed, nor while it has another."""
    index, orphaned = build_index(loading("t")), list[bool]()
    for change in (
        lambda: None,
        lambda: index.put(seed("s")),
        lambda: index.put(seed("u")),
        lambda: index.remove("s"),
        lambda: index.put(seed("u", state="draining")),
        lambda: index.put(seed("t")),
    ):
        change()
        orphaned.append(index.orphaned)
    assert [False, False, False, False, True, False] == orphaned


def test_a_draining_group_is_not_orphaned() -> None:
    """This is how the old version ends in a rollout."""
    index = build_index(seed("s"), seed("u"))
    index.put(seed("s", state="draining"))
    index.put(seed("u", state="draining"))
    assert not index.orphaned
    index.put(loading("t"))
    assert index.orphaned


def test_a_loader_without_a_seed_is_remembered_until_a_seed_exists() -> None:
    """Its fork ended as a fallback: further targets call their own loaders."""
    finish = ForkResult(outcome="fallback", seconds=1, bytes_read=0)
    reads = (StorageAssignment(kind="loader", chunks=ALL),)
    index = build_index(loading("t"), forks=[record("t", {}, storage=reads)])
    index.end_fork(record("t", {}, storage=reads, finish=finish))
    before = index.loader_only
    index.put(seed("s"))
    assert before
    assert not index.loader_only


def test_same_host_readers_are_tracked() -> None:
    """They are identified by the first transport of their plan, until they leave."""
    reads = {name: RouteRecord("s", ALL, transports, 0) for name, transports in (("t", LOCAL), ("u", ("http",)))}
    index = build_index(
        seed("s", transports=LOCAL),
        *(loading(name) for name in reads),
        forks=[replace(record(name, {}), reads=(read,)) for name, read in reads.items()],
    )
    during = {name: set(forks) for name, forks in index.view(()).same_host_readers.items()}
    index.end_fork(record("t", {}))
    assert {"s": {"fork-t"}} == during
    assert {} == index.view(()).same_host_readers
    assert {"fork-u": 1.0} == index.readers["s"]


def test_a_same_host_only_source_does_not_hide_others() -> None:
    """Among more instances than a plan considers, the usable one is found."""
    bound = [seed(f"a{number:02}", transports=("shared_memory",)) for number in range(3 * MAX_ANYWHERE)]
    index, fork_demand = (
        build_index(*bound, seed("z", transports=LOCAL)),
        demand(loading("t", transports=LOCAL)),
    )
    assert [("z", ("http",))] == [
        (each.source_id, each.transports)
        for each in plan(index.view([fork_demand]), [fork_demand], NOW)[fork_demand.fork_id].assignments
    ]


def test_idle_seeds_are_complete_and_have_no_readers() -> None:
    """Neither relays nor seeds that another target reads from, or that must not be read from, are idle."""
    members = [
        seed("busy"), seed("draining", state="draining"), seed("idle"), loading("relay", (0, 4)), loading("t", (0, 1)),
    ]  # fmt: skip
    forks = [record("relay", {"busy": ALL}), record("t", {"relay": ALL})]
    index = build_index(*members, forks=forks)
    assert ["idle"] == [each.instance_id for each in index.idle_seeds(members[-1], 5)]


def test_slow_members_are_candidates_of_slow_targets_only() -> None:
    """A slow target may read from another slow one; for the others there are enough better sources."""
    relays = [loading(f"r{number:03}", (0, 4), slow=number == 0) for number in range(3 * MAX_ANYWHERE)]
    index = build_index(seed("s"), *relays, forks=[record(each.instance_id, {"s": ALL}) for each in relays])
    found = {slow: "r000" in (index.view([demand(loading("t", slow=slow))]).candidates or ()) for slow in (False, True)}
    assert {False: False, True: True} == found
