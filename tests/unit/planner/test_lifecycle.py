"""What becomes of instances and forks with time, changes of weights, drains and failing stores."""

from __future__ import annotations

import asyncio
import re

import pytest

from planner.problems import ProblemError
from planner.registry import Registry
from planner.store.base import Change, Conflict, StoreUnavailable
from planner.store.memory import MemoryStore
from rfork.wire import ForkFinish, ForkProgress, MayExit, Placement, Plan, Share
from tests.unit.planner.builders import (
    CHECKPOINT,
    CHUNKS,
    ORIGIN,
    OTHER_LAYOUT,
    OTHER_WEIGHTS,
    SNAPSHOT,
    FakeTime,
    ask,
    fault,
    make_registry,
    offers,
    report,
    whole,
)

ALL = ((0, CHUNKS),)
FORKED = ForkFinish(outcome="forked", seconds=1, bytes_read=CHUNKS << 20)


class WeakStore(MemoryStore):
    """A store that fails as often as it is told to, with the error it is told."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__(time.clock, keep_forks=10)
        self.failures = 0
        self.error: Exception = StoreUnavailable("redis is away")

    async def commit(self, change: Change) -> None:
        """Fail, or keep the change."""
        if self.failures and (change.group is not None or not isinstance(self.error, Conflict)):
            self.failures -= 1
            raise self.error
        await super().commit(change)


@pytest.fixture
def registry(time: FakeTime) -> Registry:
    """A registry that plans each arrival at once."""
    return make_registry(time)


def chunks(count: int, rate: float = 1.0) -> ForkProgress:
    """Progress of the first so many chunks."""
    return ForkProgress(verified=((0, count),) if count else (), bytes_read=count << 20, bytes_per_s=rate)


def routes(plan: Plan) -> dict[str, tuple[tuple[int, int], ...]]:
    """Chunks by source."""
    return {route.source_id: route.chunks for route in plan.routes}


async def chain(registry: Registry, names: str, *, most: int = 4) -> None:
    """A seed and a chain of targets behind it."""
    await registry.report(whole("s", max_readers=most))
    for name in names:
        await registry.ask(ask(name, max_readers=most))


@pytest.mark.parametrize(("staying", "learnt"), [(False, [3e9, 3e9]), (True, [None, None])])
async def test_a_link_is_not_learnt_from_reads_within_a_host(
    registry: Registry, staying: bool, learnt: list[float | None]
) -> None:
    """The fastest that a target was seen to read over its link; what it copies on its host is no such."""
    ways = ("shared_memory", "http") if staying else ("http",)
    here = Placement(host="host")
    await registry.report(whole("s", transports=ways, placement=here))
    await registry.ask(ask("a", transports=ways, placement=here))
    seen: list[float | None] = []
    for rate in (3e9, 1e9):
        await registry.progress("fork-a", chunks(1, rate))
        record = registry.state.instance("a")
        seen.append(record.ingress_rate if record is not None else None)
    assert learnt == seen


async def test_new_weights_fence_the_readers_of_the_old_ones(registry: Registry) -> None:
    """No lease is renewed for the old generation, and a new plan may read the new one."""
    await chain(registry, "a")
    before = set((await registry.progress("fork-a", chunks(3))).leases)
    await registry.report(whole("s", generation=1, weights_id=OTHER_WEIGHTS))
    after = set((await registry.progress("fork-a", chunks(4))).leases)
    again = await registry.ask(ask("a", faults=(fault("s", "SourceChanged"),)))
    assert ({"s"}, set(), {"s": ALL}, OTHER_WEIGHTS) == (before, after, routes(again), again.weights_id)


async def test_chunks_of_the_old_weights_are_not_mixed_with_the_new(registry: Registry) -> None:
    """A fork that has begun is given nobody, and told why."""
    await chain(registry, "a")
    await registry.report(whole("s", generation=1, weights_id=OTHER_WEIGHTS))
    plan = await registry.ask(ask("a", (0, 4), faults=(fault("s", "SourceChanged"),)))
    assert {} == routes(plan)
    assert f"s holds other weights ({OTHER_WEIGHTS})" in plan.reason


EXITS = [
    (
        "unknown",
        [],
        False,
        False,
        0,
        "the planner has just started: it does not know yet who reads from whom",
    ),
    ("read from", ["s"], True, False, 1, "forks that read from it: 1"),
    (
        "idle",
        ["s", "t"],
        False,
        True,
        0,
        "nobody reads from it; drain it first, or somebody may be sent to it",
    ),
]


@pytest.mark.parametrize(("why", "seeds", "reader", "may", "readers", "reason"), EXITS)
async def test_may_exit(
    registry: Registry, why: str, seeds: list[str], reader: bool, may: bool, readers: int, reason: str
) -> None:
    """What a preStop hook is told of `s`."""
    for name in seeds:
        await registry.report(whole(name))
    if reader:
        await registry.ask(ask("a"))
    assert MayExit(may_exit=may, readers=readers, reason=reason) == await registry.may_exit("s")


async def test_once_the_fleet_was_heard_who_is_not_known_may_exit(registry: Registry, time: FakeTime) -> None:
    """One heartbeat after its start the planner knows everybody."""
    before = await registry.may_exit("s")
    time.now += 5
    after = await registry.may_exit("s")
    assert (False, True) == (before.may_exit, after.may_exit)


async def test_a_drained_seed_may_exit_once_its_readers_are_done(registry: Registry) -> None:
    """It keeps the readers it has, and gets no new ones."""
    await registry.report(whole("t", max_readers=0))
    await chain(registry, "a")
    await registry.drain("s")
    kept = await registry.ask(ask("a"))
    refused = await registry.ask(
        ask("b", placement={"host": "elsewhere"}, faults=(fault("a", "SourceBusy"),))
    )
    waits = (await registry.may_exit("s")).may_exit
    await registry.finish("fork-a", FORKED)
    assert ({"s": ALL}, {}, False, "it is drained and nobody reads from it") == (
        routes(kept), routes(refused), waits, (await registry.may_exit("s")).reason,
    )  # fmt: skip


async def test_the_last_seed_is_not_drained_without_force(registry: Registry) -> None:
    """Nor may it exit while forks are under way that may need it."""
    await chain(registry, "ab")
    with pytest.raises(ProblemError) as refused:
        await registry.drain("s")
    drained = await registry.drain("s", force=True)
    await registry.finish("fork-a", FORKED.model_copy(update={"outcome": "failed"}))
    assert (409, "last-seed", "draining") == (refused.value.status, refused.value.slug, drained.source.state)
    assert not (await registry.may_exit("s")).may_exit


@pytest.mark.parametrize(
    ("other", "last"),
    [
        (whole("o"), False),
        (whole("o", weights_id=OTHER_WEIGHTS), True),
        (whole("o", layout_id=OTHER_LAYOUT), True),
        (whole("o", state="draining"), True),
        (report("o", (0, 11)), True),
        (whole("o", model="other"), True),
    ],
)
async def test_who_counts_as_another_seed(registry: Registry, other: object, last: bool) -> None:
    """Complete, of the same weights and layout, and not draining itself."""
    await registry.report(whole("s"))
    await registry.report(other)  # type: ignore[arg-type]
    try:
        await registry.drain("s")
        refused = False
    except ProblemError:
        refused = True
    assert last == refused


async def test_a_relay_is_never_the_last_seed(registry: Registry) -> None:
    """It may be drained."""
    await chain(registry, "a")
    assert "draining" == (await registry.drain("a")).source.state


async def test_the_silent_are_forgotten_with_their_forks(registry: Registry, time: FakeTime) -> None:
    """The seed goes on; the silent target's place is free, and others are not affected."""
    await chain(registry, "a", most=1)
    for _ in range(4):
        time.now += 6
        await registry.report(whole("s", max_readers=1))
    with pytest.raises(ProblemError) as unknown:
        registry.instance("a")
    fork = registry.fork("fork-a")
    assert (404, "failed", {"s": ALL}) == (
        unknown.value.status,
        fork.state,
        routes(await registry.ask(ask("b"))),
    )


async def test_progress_is_a_sign_of_life(registry: Registry, time: FakeTime) -> None:
    """A target that is busy reading sends no heartbeat, and is not forgotten."""
    await chain(registry, "a")
    for count in range(1, 8):
        time.now += 10
        await registry.report(whole("s"))
        await registry.progress("fork-a", chunks(count))
    instance, fork = registry.instance("a").report, registry.fork("fork-a")
    assert ("loading", "running", ((0, 7),)) == (instance.state, fork.state, instance.verified)


async def test_quarantine_ends_and_its_reason_is_shown_until_then(registry: Registry, time: FakeTime) -> None:
    """A source that lied gets no reader for a minute."""
    await chain(registry, "a")
    await registry.ask(ask("a", faults=(fault("s", "SourceCorrupt"),)))
    shown = [registry.instance("s").view(time.now).quarantined]
    for _ in range(6):
        time.now += 10
        await registry.report(whole("s"))
    shown.append(registry.instance("s").view(time.now).quarantined)
    assert (["SourceCorrupt", None], {"s": ALL}) == (shown, routes(await registry.ask(ask("b"))))


async def test_readers_of_a_relay_that_falls_behind_are_told_to_ask_again(
    registry: Registry, time: FakeTime
) -> None:
    """Once: the new plan, made with that known, is to be kept."""
    await chain(registry, "abcdef")
    for name, count in {"a": 10, "b": 9, "c": 1, "d": 1, "e": 1, "f": 1}.items():
        await registry.progress(f"fork-{name}", chunks(count))
    time.now += 2
    told = {name: (await registry.progress(f"fork-{name}", chunks(1))).ask_again for name in "bd"}
    await registry.ask(ask("d", (0, 1), max_readers=4))
    after = (await registry.progress("fork-d", chunks(1))).ask_again
    assert ({"b": None, "d": "source c falls behind"}, None) == (told, after)


async def test_a_slow_mark_ends_with_the_fork_it_was_given_for(registry: Registry, time: FakeTime) -> None:
    """The instance's next fork starts without it."""
    await chain(registry, "abcdef")
    for name, count in {"a": 10, "b": 9, "c": 1, "d": 1, "e": 1, "f": 1}.items():
        await registry.progress(f"fork-{name}", chunks(count))
    time.now += 2
    await registry.sweep()
    slow = registry.instance("c").source.slow
    await registry.ask(ask("c").model_copy(update={"fork_id": "again"}))
    assert (True, False) == (slow, registry.instance("c").source.slow)


async def test_progress_renews_leases_while_the_store_is_away(time: FakeTime) -> None:
    """Forks under way do not end with the store; other calls say that it is away."""
    store = WeakStore(time)
    registry = make_registry(time, store)
    await chain(registry, "a")
    store.failures = 1
    leases = set((await registry.progress("fork-a", chunks(3))).leases)
    store.failures = 1
    with pytest.raises(StoreUnavailable):
        await registry.ask(ask("b"))
    assert ({"s"}, {"a": ALL}) == (leases, routes(await registry.ask(ask("b"))))


async def test_a_planner_that_restarted_keeps_the_routes_it_is_told_of(time: FakeTime) -> None:
    """Each target tells what it reads, in whatever order they come."""
    for order in ("abc", "cba", "bac"):
        registry = make_registry(time)
        await registry.report(whole("s", readers=("fork-a",)))
        for name, reader in {"a": "b", "b": "c"}.items():
            await registry.report(report(name, (0, 4), readers=(f"fork-{reader}",)))
        told = {"a": "s", "b": "a", "c": "b"}
        plans = {}
        for name in order:
            current = (Share(source_id=told[name], chunks=((4, 12),)),)
            asked = ask(name, (0, 4)).model_copy(update={"current": current})
            plans[name] = routes(await registry.ask(asked))
        assert {name: {source: ((4, 12),)} for name, source in told.items()} == plans


@pytest.mark.parametrize(("conflicts", "planned"), [(1, True), (19, True), (20, False)])
async def test_a_plan_that_others_were_quicker_than_is_made_anew(
    time: FakeTime, conflicts: int, planned: bool
) -> None:
    """Twenty times at most; then the caller is told to come back."""
    store = WeakStore(time)
    registry = make_registry(time, store)
    await registry.report(whole("s"))
    store.failures, store.error = conflicts, Conflict()
    try:
        plan = routes(await registry.ask(ask("a")))
        answer = (200, "", plan)
    except ProblemError as error:
        answer = (error.status, error.slug, {})
    assert ((200, "", {"s": ALL}) if planned else (503, "busy", {})) == answer


async def test_what_a_target_reads_now_is_checked(registry: Registry) -> None:
    """Chunks past the image's end are the caller's mistake."""
    current = (Share(source_id="s", chunks=((4, 13),)),)
    with pytest.raises(ProblemError) as refused:
        await registry.ask(ask("a").model_copy(update={"current": current}))
    assert (422, "invalid-request") == (refused.value.status, refused.value.slug)


async def test_one_target_with_bad_memory_quarantines_nobody(registry: Registry) -> None:
    """To one that says it of a second source nobody listens, nor to what it said of the first."""
    for name in "stu":
        await registry.report(whole(name))
    plan = await registry.ask(ask("a"))
    lies = tuple(fault(route.source_id, "SourceCorrupt") for route in plan.routes)
    await registry.ask(ask("a", faults=lies))
    assert 1 < len(lies)
    assert [""] * 3 == [registry.instance(name).quarantine for name in "stu"]


async def test_a_drain_in_the_window_of_a_batch_holds(time: FakeTime) -> None:
    """The plan that comes after it puts the report onto what is known then."""
    registry = make_registry(time, batch_s=0.02)
    await registry.report(report("a"))
    asking = asyncio.create_task(registry.ask(ask("a")))
    await asyncio.sleep(0)
    await registry.drain("a")
    await asking
    assert registry.instance("a").drained


async def test_a_removal_in_the_window_of_a_batch_holds(time: FakeTime) -> None:
    """Who was removed meanwhile is told so, and is not there again."""
    registry = make_registry(time, batch_s=0.02)
    await registry.report(report("a"))
    asking = asyncio.create_task(registry.ask(ask("a")))
    await asyncio.sleep(0)
    await registry.remove("a")
    with pytest.raises(ProblemError, match="was removed"):
        await asking
    assert None is registry.state.instance("a")


async def test_of_two_drains_of_the_last_two_one_is_refused(time: FakeTime) -> None:
    """The store takes the first; the second looks again, and finds that it is the last."""
    store = WeakStore(time)
    registry = make_registry(time, store)
    for name in "st":
        await registry.report(whole(name))
    await registry.drain("t")
    store.failures, store.error = 1, Conflict()
    with pytest.raises(ProblemError, match="last that holds"):
        await registry.drain("s")


async def test_a_fenced_source_is_not_gone_back_to(registry: Registry) -> None:
    """Its generation changed and its fork has ended: the one that read from it is sent elsewhere."""
    await registry.report(whole("s"))
    await chain(registry, "ab")
    await registry.finish("fork-a", ForkFinish(outcome="fallback", seconds=1, bytes_read=0))
    await registry.report(report("a", generation=1))
    plan = await registry.ask(ask("b", faults=(fault("a", "SourceChanged"),)))
    assert {"s": ((0, 12),)} == routes(plan)


async def test_a_fork_that_outlived_the_planners_memory_waits_for_those_it_read_from(
    registry: Registry, time: FakeTime
) -> None:
    """They are heard of within a heartbeat; who comes anew, or asks after that, hears that nobody is here."""
    lost = await registry.ask(ask("a", (0, 5), faults=(fault("s", "SourceStalled"),)))
    fresh = await registry.ask(ask("n", model="other"))
    time.now += 4
    again = await registry.ask(ask("a", (0, 5)))
    time.now += 1
    late = await registry.ask(ask("a", (0, 5)))
    assert [True, False, True, False] == [
        plan.retry_after_s is not None for plan in (lost, fresh, again, late)
    ]


async def test_a_fork_whose_sources_all_died_does_not_wait_for_them(registry: Registry) -> None:
    """The planner knew them: nobody else will be heard of."""
    await chain(registry, "a")
    await registry.remove("s")
    plan = await registry.ask(ask("a", (0, 5), faults=(fault("s", "SourceGone"),)))
    assert ([], None) == (list(plan.routes), plan.retry_after_s)


async def test_who_waits_for_a_reader_whose_storage_failed_reads_on_in_its_place(
    registry: Registry, time: FakeTime
) -> None:
    """The reader waits, its follower is told to ask again, and from then on it is the other way round."""
    await registry.ask(ask("a", storage=offers(CHECKPOINT)))
    await registry.ask(ask("b"))
    before = (await registry.progress("fork-b", chunks(4))).ask_again
    time.now += 1
    failed = (fault("a", "StorageError", "storage"),)
    waits = [
        await registry.ask(ask("a", (0, 5), faults=faults, weights_id=None, draft=ORIGIN))
        for faults in (failed, ())
    ]
    told = (await registry.progress("fork-b", chunks(4))).ask_again
    time.now += 1
    instead = await registry.ask(ask("b", (0, 4), storage=offers(CHECKPOINT), weights_id=None, draft=ORIGIN))
    again = await registry.ask(ask("a", (0, 5), weights_id=None, draft=ORIGIN))
    assert (
        (None, "source a has nobody to read from any more"),
        [({}, True)] * 2,
        ({"a": ((4, 5),)}, [((5, CHUNKS),)]),
        {"b": ((5, CHUNKS),)},
    ) == (
        (before, told),
        [(routes(plan), plan.retry_after_s is not None) for plan in waits],
        (routes(instead), [read.chunks for read in instead.storage]),
        routes(again),
    )


async def test_a_storage_that_failed_and_is_offered_no_more_leaves_the_others(registry: Registry) -> None:
    """Its snapshot is broken: the same instance is elected to read its checkpoint."""
    both = offers(SNAPSHOT, CHECKPOINT)
    await registry.ask(ask("a", storage=both))
    plan = await registry.ask(ask("a", faults=(fault("a", "StorageError", "storage"),), storage=both[1:]))
    assert ["checkpoint"] == [read.kind for read in plan.storage]


async def test_a_fork_that_was_given_up_and_succeeds_is_learnt_from_once(time: FakeTime) -> None:
    """Until then it is only lost: it neither failed, nor tells how long forks take."""
    registry = make_registry(time, lease_ttl_s=5, forget_s=1000)
    await registry.report(whole("s"))
    await registry.ask(ask("a"))
    time.now += 10
    await registry.sweep()
    (group,) = registry.state.groups_of("m")
    lost = registry.fork("fork-a").lost, group.durations.fork_s, group.forked_bytes
    await registry.finish(
        "fork-a", ForkFinish(outcome="forked", seconds=11, bytes_read=12 << 20, sources={"s": 12 << 20})
    )
    text = registry._metrics.exposition((), ()).decode()
    counted = re.findall(r'^rfork_planner_forks_total\{outcome="(\w+)"\} 1.0$', text, re.MULTILINE)
    assert ((True, None, 0), (11.0, 12 << 20), {"lost", "forked"}) == (
        lost, (group.durations.fork_s, group.forked_bytes), set(counted),
    )  # fmt: skip
