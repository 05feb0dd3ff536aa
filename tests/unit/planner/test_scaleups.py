from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from planner import scaleups
from planner.arrivals import place_of
from planner.problems import ProblemError
from planner.registry import Registry
from planner.store.base import Change, StoreUnavailable
from planner.store.memory import MemoryStore
from rfork.wire import (
    ForkFinish,
    ForkRequest,
    MayExit,
    Placement,
    Plan,
    Rank,
    ScaleUp,
    ScaleUpView,
    SourceFault,
)
from tests.unit.planner.builders import CHUNKS, FakeTime, ask, fault, make_registry, report, whole

ONLY = Rank()
RANKS = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))
LAST = "it is the last that holds these weights, and 3 replicas are expected"


class CountingStore(MemoryStore):
    """Counts how many forks each plan was for, and is away when told."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__(time.clock, keep_forks=100)
        self.plans: list[int] = []
        self.away = False

    async def commit(self, change: Change) -> None:
        """Count the change where it is a plan, and keep it."""
        if self.away:
            raise StoreUnavailable("redis is away")
        if change.group is not None:
            self.plans.append(len(change.forks))
        await super().commit(change)


@pytest.fixture
def store(time: FakeTime) -> CountingStore:
    """The store of `registry`."""
    return CountingStore(time)


@pytest.fixture
def registry(time: FakeTime, store: CountingStore) -> Registry:
    """A registry that would wait for a minute, and plans at once whom nobody announced."""
    return make_registry(time, store, gather_s=4)


def scaleup(replicas: int, name: str = "up", **changes: object) -> ScaleUp:
    """Replicas of the model `m`."""
    return ScaleUp.model_validate({"scaleup_id": name, "model": "m", "replicas": replicas} | changes)


def start(*requests: Coroutine[Any, Any, Plan]) -> list[asyncio.Task[Plan]]:
    """Ask, and go on."""
    return [asyncio.create_task(each) for each in requests]


async def idle() -> None:
    """Until everybody waits who is going to."""
    for _ in range(20):
        await asyncio.sleep(0)


def waiting(tasks: list[asyncio.Task[Plan]]) -> int:
    """How many have no plan yet."""
    return sum(not task.done() for task in tasks)


def member(
    replica: str, rank: Rank = ONLY, start: str = "0", faults: tuple[SourceFault, ...] = ()
) -> ForkRequest:
    """The request of one rank of a replica, by the id that engines give it."""
    return ask(f"{replica}-{rank.key}-dp{rank.dp}-{start}", rank=rank, faults=faults)


async def test_those_that_were_announced_share_one_plan(registry: Registry, store: CountingStore) -> None:
    """However far apart they come: the last one ends the wait of all."""
    await registry.report(whole("s"))
    await registry.scaleups.announce(scaleup(3))
    tasks: list[asyncio.Task[Plan]] = []
    seen = []
    for name in "abc":
        tasks += start(registry.ask(ask(name)))
        await idle()
        seen.append(waiting(tasks))
    plans = [task.result() for task in tasks]
    sources = [route.source_id for plan in plans for route in plan.routes]
    assert ([1, 2, 0], [3], ["s", "a", "b"]) == (seen, store.plans, sources)


async def test_those_that_were_not_announced_wait_for_nobody(
    registry: Registry, store: CountingStore
) -> None:
    """Of another model, and of this one once all that were announced have come."""
    await registry.scaleups.announce(scaleup(1))
    await registry.ask(ask("other", model="other"))
    await registry.ask(ask("announced"))
    await registry.ask(ask("late"))
    assert [1, 1, 1] == store.plans


async def test_nobody_waits_longer_than_the_setting_says(time: FakeTime, store: CountingStore) -> None:
    """What came by then is planned; the one that comes later is the last that is expected."""
    registry = make_registry(time, store, gather_s=0.05)
    await registry.scaleups.announce(scaleup(3))
    await asyncio.gather(registry.ask(ask("a")), registry.ask(ask("b")))
    await registry.ask(ask("c"))
    assert [2, 1] == store.plans


async def test_zero_seconds_gather_nobody(time: FakeTime, store: CountingStore) -> None:
    """They are counted all the same."""
    registry = make_registry(time, store, gather_s=0)
    await registry.scaleups.announce(scaleup(2))
    await registry.ask(ask("a"))
    assert ([1], 1) == (store.plans, registry.scaleups.view("up").arrived)


async def test_each_rank_has_its_batch(registry: Registry, store: CountingStore) -> None:
    """Two replicas of two ranks are two plans of two."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start(*(registry.ask(member("one", rank)) for rank in RANKS))
    await idle()
    first = waiting(tasks)
    tasks += start(registry.ask(member("two", RANKS[0])))
    await idle()
    second = waiting(tasks)
    await registry.ask(member("two", RANKS[1]))
    await asyncio.gather(*tasks)
    assert (2, 1, [2, 2]) == (first, second, store.plans)


async def test_data_parallel_ranks_of_one_replica_are_gathered_too(
    registry: Registry, store: CountingStore
) -> None:
    """They are in one group: as many as the seeds have, of each new replica."""
    for dp in range(2):
        await registry.report(whole(f"seed-{dp}", rank=Rank(dp=dp)))
    await registry.scaleups.announce(scaleup(2))
    members = [member(replica, Rank(dp=dp)) for replica in ("one", "two") for dp in range(2)]
    tasks = start(*(registry.ask(each) for each in members[:3]))
    await idle()
    before = waiting(tasks)
    await registry.ask(members[3])
    await asyncio.gather(*tasks)
    assert (3, [4]) == (before, store.plans)


async def test_a_replica_of_several_pods_counts_once(registry: Registry) -> None:
    """Each of its Pods has a name of its own, and other ranks."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start(registry.ask(member("pod-a", RANKS[0])), registry.ask(member("pod-b", RANKS[1])))
    await idle()
    expected = [registry.scaleups.expected(("m", rank.key)) for rank in RANKS]
    assert (1, [1, 1]) == (registry.scaleups.view("up").arrived, expected)
    await registry.scaleups.withdraw("up")
    await asyncio.gather(*tasks)


async def test_who_was_known_before_does_not_count(
    registry: Registry, store: CountingStore, time: FakeTime
) -> None:
    """Nor waits: one that asks again, one whose heartbeat came before, one that starts again in its place."""
    await registry.ask(ask("a"))
    await registry.report(report("b"))
    await registry.ask(member("c"))
    time.now += 1
    await registry.scaleups.announce(scaleup(2))
    for request in (ask("a"), ask("b"), member("c", start="1")):
        await registry.ask(request)
    assert ([1] * 5, 0, 2) == (
        store.plans,
        registry.scaleups.view("up").arrived,
        registry.scaleups.expected(("m", Rank().key)),
    )


async def test_who_came_and_asks_again_counts_once(registry: Registry) -> None:
    """A re-plan, and a new start in the same place."""
    await registry.scaleups.announce(scaleup(3))
    first = start(registry.ask(member("one")))
    await idle()
    urgent = await registry.ask(member("one", faults=(fault("x", "SourceGone"),)))
    again = start(registry.ask(member("one", start="1")))
    await idle()
    assert ("", 1, 2) == (
        "".join(route.source_id for route in urgent.routes),
        registry.scaleups.view("up").arrived,
        waiting(first + again),
    )
    await registry.scaleups.withdraw("up")
    await asyncio.gather(*first, *again)


async def test_a_request_that_is_sent_again_waits_with_the_others(
    registry: Registry, store: CountingStore
) -> None:
    """A caller whose patience ended asks again: it is one fork, and one plan."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start(registry.ask(ask("a")))
    await idle()
    tasks[0].cancel()
    tasks += start(registry.ask(ask("a")))
    await idle()
    before = waiting(tasks)
    await registry.ask(ask("b"))
    await tasks[1]
    assert (1, [2]) == (before, store.plans)


async def test_who_gave_up_while_it_waited_is_not_planned(registry: Registry, store: CountingStore) -> None:
    """It loads by itself, and told so: nobody is to stand behind it."""
    await registry.report(whole("s", max_readers=1))
    await registry.scaleups.announce(scaleup(3))
    tasks = start(*(registry.ask(ask(name)) for name in "ab"))
    await idle()
    tasks[0].cancel()
    finish = ForkFinish(outcome="fallback", seconds=1.0, bytes_read=0, sources={}, reasons=("away",))
    await registry.finish("fork-a", finish)
    tasks += start(registry.ask(ask("c")))
    plans = await asyncio.gather(*tasks[1:])
    assert ([2], ["s", "b"]) == (store.plans, [route.source_id for plan in plans for route in plan.routes])


async def test_who_is_urgent_counts_and_does_not_wait(registry: Registry, store: CountingStore) -> None:
    """One that kept chunks of a fork before it died: it was the last that the other waited for."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start(registry.ask(ask("a")))
    await idle()
    await registry.ask(ask("b", (0, 3)))
    await asyncio.gather(*tasks)
    assert ([1, 1], 2) == (store.plans, registry.scaleups.view("up").arrived)


async def test_who_goes_on_with_a_plan_from_before_a_restart_does_not_count(registry: Registry) -> None:
    """The planner forgot it, and then was told of a scale-up: it is none of those to come."""
    await registry.scaleups.announce(scaleup(2))
    going = ask("a", (0, 3)).model_copy(update={"faults": (fault("x", "SourceGone"),)})
    await registry.ask(going)
    assert 0 == registry.scaleups.view("up").arrived


RELEASES = {
    "withdrawn": ("withdraw", 0),
    "none comes any more": ("announce", 0),
    "fewer come": ("announce", 1),
    "expired": ("expire", 0),
}


@pytest.mark.parametrize("how", RELEASES)
async def test_nobody_waits_for_those_that_are_not_expected_any_more(
    registry: Registry, store: CountingStore, time: FakeTime, how: str
) -> None:
    """They are planned at once, together."""
    what, left = RELEASES[how]
    await registry.scaleups.announce(scaleup(5, expires_in_s=10))
    tasks = start(registry.ask(ask("a")), registry.ask(ask("b")))
    await idle()
    before = waiting(tasks)
    if what == "withdraw":
        await registry.scaleups.withdraw("up")
    elif what == "announce":
        await registry.scaleups.announce(scaleup(left))
    else:
        time.now += 11
        await registry.sweep()
    if left:
        tasks += start(registry.ask(ask("c")))
    await asyncio.gather(*tasks)
    assert (2, [2 + left], left) == (before, store.plans, len(registry.scaleups.views()))


async def test_a_scale_up_that_expires_between_two_sweeps_releases_its_waiters(
    time: FakeTime, store: CountingStore
) -> None:
    """Whoever waits looks at the time by itself."""
    registry = make_registry(time, store, gather_s=4)
    await registry.scaleups.announce(scaleup(2, expires_in_s=0.02))
    tasks = start(registry.ask(ask("a")))
    await idle()
    time.now += 1
    await asyncio.gather(*tasks)
    assert [1] == store.plans


async def test_said_again_those_count_that_have_not_come_by_then(registry: Registry) -> None:
    """Two of three came: the two that are told of then are others, and what came is not forgotten."""
    await registry.scaleups.announce(scaleup(3))
    tasks = start(*(registry.ask(member(name, RANKS[0])) for name in ("one", "two")))
    await idle()
    told = [registry.scaleups.view("up").arrived]
    view = await registry.scaleups.announce(scaleup(2))
    told.append(view.arrived)
    expected = [registry.scaleups.expected(("m", rank.key)) for rank in RANKS]
    tasks += start(*(registry.ask(member(name, RANKS[0])) for name in ("three", "four")))
    await asyncio.gather(*tasks)
    told.append(registry.scaleups.view("up").arrived)
    assert ([2, 0, 2], [2, 4], True) == (told, expected, not waiting(tasks))


async def test_two_scale_ups_of_one_model_add_up(
    registry: Registry, store: CountingStore, time: FakeTime
) -> None:
    """Whoever comes counts for the one that was announced first, as long as it has place."""
    await registry.scaleups.announce(scaleup(1, "one"))
    time.now += 1
    await registry.scaleups.announce(scaleup(2, "two"))
    tasks = start(registry.ask(ask("a")), registry.ask(ask("b")))
    await idle()
    arrived = [(view.scaleup.scaleup_id, view.arrived) for view in registry.scaleups.views()]
    await registry.ask(ask("c"))
    await asyncio.gather(*tasks)
    assert ([("one", 1), ("two", 1)], [3]) == (arrived, store.plans)


async def test_an_instance_that_is_removed_while_it_waits_is_not_planned(registry: Registry) -> None:
    """Its Pod died: its caller is told, and the others get their plan."""
    await registry.scaleups.announce(scaleup(3))
    tasks = start(registry.ask(ask("a")), registry.ask(ask("b")))
    await idle()
    await registry.remove("a")
    await registry.scaleups.withdraw("up")
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[0], ProblemError)
    assert ("fork-conflict", "fork-b") == (answers[0].slug, getattr(answers[1], "fork_id", ""))


async def test_an_arrival_that_the_store_does_not_take_is_told(
    registry: Registry, store: CountingStore
) -> None:
    """It asks again, and counts then."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start(registry.ask(ask("a")))
    await idle()
    store.away = True
    with pytest.raises(StoreUnavailable):
        await registry.ask(ask("b"))
    store.away = False
    arrived = registry.scaleups.view("up").arrived
    await registry.ask(ask("b"))
    await asyncio.gather(*tasks)
    assert (1, [2]) == (arrived, store.plans)


async def test_the_last_seed_stays_while_replicas_are_expected(registry: Registry) -> None:
    """It is not drained but by force, and may not exit; drained, it would be kept for nobody."""
    await registry.report(whole("s"))
    before = await registry.may_exit("s")
    await registry.scaleups.announce(scaleup(3))
    with pytest.raises(ProblemError) as refused:
        await registry.drain("s")
    during = await registry.may_exit("s")
    await registry.drain("s", force=True)
    after = await registry.may_exit("s")
    assert (True, MayExit(may_exit=False, readers=0, reason=LAST), True) == (
        before.may_exit, during, after.may_exit,
    )  # fmt: skip
    assert f"instance s {LAST[3:]}: start another, or drain it with force" == refused.value.detail


async def test_a_seed_that_is_not_the_last_may_go(registry: Registry) -> None:
    """However many are expected; the one that is left may not."""
    for name in "st":
        await registry.report(whole(name))
    await registry.scaleups.announce(scaleup(1))
    answers = [await registry.may_exit("s")]
    await registry.remove("s")
    answers.append(await registry.may_exit("t"))
    expected = "it is the last that holds these weights, and 1 replica is expected"
    assert ([True, False], expected) == ([each.may_exit for each in answers], answers[1].reason)


ALONE = "they read storage once, or load by themselves"
VIEWS: list[tuple[list[Any], int, int, str]] = [
    ([], 0, 0, f"no instance holds m: {ALONE}"),
    ([report("t")], 0, CHUNKS, f"no instance holds m: {ALONE}"),
    ([whole("s")], 1, CHUNKS, "they fork from 1 seed"),
    ([whole("s"), whole("t"), report("u", (0, 3))], 2, CHUNKS, "they fork from 2 seeds"),
    ([whole("s"), whole("t", state="draining")], 1, CHUNKS, "they fork from 1 seed"),
    (
        [whole("s", rank=RANKS[0]), whole("t", rank=RANKS[0]), whole("u", rank=RANKS[1])],
        1,
        2 * CHUNKS,
        "they fork from 1 seed",
    ),
    (
        [whole("s", rank=RANKS[0]), report("t", rank=RANKS[1])],
        0,
        2 * CHUNKS,
        f"no instance holds rank {RANKS[1].key}: {ALONE}; other ranks fork from 1 seed",
    ),
    (
        [whole("s", rank=RANKS[0])],
        0,
        CHUNKS,
        f"no instance holds 1 of the ranks: {ALONE}; other ranks fork from 1 seed",
    ),
    (
        [whole("s"), whole("t", rank=RANKS[0]), report("u", rank=RANKS[1])],
        1,
        CHUNKS,
        "they fork from 1 seed",
    ),
    (
        [whole("s"), whole("d", rank=Rank(role="draft")), whole("e", rank=Rank(role="draft"))],
        1,
        2 * CHUNKS,
        "they fork from 1 seed",
    ),
]


@pytest.mark.parametrize(("reports", "seeds", "image", "reason"), VIEWS)
async def test_what_awaits_those_that_come_is_told(
    registry: Registry, reports: list[Any], seeds: int, image: int, reason: str
) -> None:
    """Seeds of the rank that fewest hold, bytes of all ranks of a replica, and what they will do."""
    for each in reports:
        await registry.report(each)
    expected = ScaleUpView(
        scaleup=scaleup(3), arrived=0, expires_in_s=900, seeds=seeds, image_bytes=image << 20, reason=reason
    )
    assert expected == await registry.scaleups.announce(scaleup(3))


async def test_a_source_in_quarantine_is_no_seed(registry: Registry) -> None:
    """Nobody is sent to it."""
    await registry.report(whole("s"))
    await registry.ask(ask("t"))
    await registry.ask(ask("t", faults=(fault("s", "SourceCorrupt"),)))
    assert 0 == (await registry.scaleups.announce(scaleup(1))).seeds


async def test_one_that_expired_is_forgotten(registry: Registry, time: FakeTime) -> None:
    """It is listed no more at once, and gone with the next sweep; the same id begins anew."""
    await registry.scaleups.announce(scaleup(3, expires_in_s=10))
    time.now += 9
    left = registry.scaleups.view("up").expires_in_s
    time.now += 1
    listed, kept = registry.scaleups.views(), len(registry.state.scaleups())
    with pytest.raises(ProblemError, match="no scale-up up is known"):
        registry.scaleups.view("up")
    await registry.sweep()
    assert (1, [], 1, 0) == (left, listed, kept, len(registry.state.scaleups()))


async def test_only_so_many_are_kept(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more, and that is forgotten which would expire first; one that is said again is none more."""
    monkeypatch.setattr(scaleups, "MOST", 2)
    for name, seconds in (("a", 100), ("b", 50), ("a", 90), ("c", 10), ("d", 500)):
        await registry.scaleups.announce(scaleup(1, name, expires_in_s=seconds))
    assert ["a", "d"] == [view.scaleup.scaleup_id for view in registry.scaleups.views()]


async def test_an_id_that_is_used_for_another_model_begins_anew(registry: Registry, time: FakeTime) -> None:
    """Nobody is waited for of the first."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start(registry.ask(ask("a")))
    await idle()
    view = await registry.scaleups.announce(scaleup(2, model="n"))
    await asyncio.gather(*tasks)
    assert (0, [0, 2]) == (
        view.arrived, [registry.scaleups.expected((model, Rank().key)) for model in "mn"],
    )  # fmt: skip


PLACES = [
    (member("web-0"), "web-0"),
    (member("a-target-b", Rank(tp=3, tp_size=8, dp=2)), "a-target-b"),
    (ask("by-hand", placement=Placement(host="h", pod="default/web-0")), "default/web-0"),
    (ask("by-hand"), "by-hand"),
    (ask(f"-{Rank().key}-dp0-0"), f"-{Rank().key}-dp0-0"),
]


@pytest.mark.parametrize(("request_", "expected"), PLACES)
def test_the_place_of_an_instance(request_: ForkRequest, expected: str) -> None:
    """What its id says before its rank, else its Pod, else itself."""
    assert expected == place_of(request_.instance)


ALL = ((0, CHUNKS),)


async def planned_twice(time: FakeTime, meanwhile: ForkFinish | None) -> tuple[Registry, asyncio.Task[Plan]]:
    """A fork that waited at one replica of the planner for others, and asked at the other, which planned it
    at once, and which is told of its end if there is one `meanwhile`; the first, and what it answers.
    """
    store = MemoryStore(time.clock, keep_forks=100)
    here, there = (make_registry(time, store, gather_s=4) for _ in range(2))
    await here.report(whole("s1"))
    await here.scaleups.announce(scaleup(2))
    (waiting,) = start(here.ask(ask("t")))
    await asyncio.sleep(0)
    while not here.state.instances()[-1].asked:
        await asyncio.sleep(0)
    await there.ask(ask("t"))
    await there.report(whole("s2", placement=Placement(host="host-t")))
    if meanwhile is not None:
        await there.finish("fork-t", meanwhile)
    await here.scaleups.withdraw("up")
    await asyncio.wait([waiting])
    return here, waiting


async def test_a_fork_that_another_replica_planned_keeps_that_plan(time: FakeTime) -> None:
    """Its target reads by it: the record must not say otherwise, nor its lease die."""
    registry, waiting = await planned_twice(time, None)
    plan = await waiting
    reads = registry.fork("fork-t").reads
    assert ([("s1", ALL)], [("s1", ALL)], True) == (
        [(route.source_id, route.chunks) for route in plan.routes],
        [(read.source_id, read.chunks) for read in reads],
        bool(plan.routes[0].lease.token),
    )


async def test_a_fork_that_ended_at_another_replica_is_not_planned_again(time: FakeTime) -> None:
    """Who still waits for its plan is told so."""
    registry, waiting = await planned_twice(time, ForkFinish(outcome="forked", seconds=1, bytes_read=1))
    error = waiting.exception()
    assert isinstance(error, ProblemError)
    assert (409, "fork-conflict", False) == (error.status, error.slug, registry.fork("fork-t").live)
