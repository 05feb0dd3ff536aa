"""Who waits for whom, and what ends the wait."""

from __future__ import annotations

import asyncio

import pytest

from planner.problems import ProblemError
from planner.registry import Registry
from rfork.wire import ForkFinish, Plan, Rank
from tests.unit.planner.builders import FakeTime, ask, make_registry, whole
from tests.unit.planner.scaleups.arriving import RANKS, CountingStore, idle, member, scaleup, start, waiting


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
    registry = make_registry(time, store, gather_s=8)
    await registry.scaleups.announce(scaleup(2, expires_in_s=0.02))
    tasks = start(registry.ask(ask("a")))
    await idle()
    time.now += 1
    await asyncio.gather(*tasks)
    assert [1] == store.plans


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
