"""Batching of scale-up requests."""

from __future__ import annotations

import asyncio

import pytest

from planner.core.problems import ProblemError
from planner.core.records import StoreChange
from planner.plan_service import PlanService
from rfork.asyncio_timeout import timeout
from rfork.schema import ForkResult, Plan, Rank
from tests.unit.planner.builders import FakeTime, fork_request, make_service, seed_report
from tests.unit.planner.scaleups.arrivals import (
    RANKS,
    CountingStore,
    count_waiting,
    rank_request,
    run_until_idle,
    scaleup,
    start_requests,
)


async def test_announced_replicas_share_one_plan(service: PlanService, store: CountingStore) -> None:
    """However far apart they arrive, the last one ends the wait."""
    await service.report(seed_report("s"))
    await service.announce(scaleup(3))
    tasks: list[asyncio.Task[Plan]] = []
    seen = []
    for name in "abc":
        tasks += start_requests(service.plan(fork_request(name)))
        await run_until_idle()
        seen.append(count_waiting(tasks))
    plans = [task.result() for task in tasks]
    sources = [route.source_id for plan in plans for route in plan.routes]
    assert [1, 2, 0] == seen
    assert [3] == store.plans
    assert ["s", "a", "b"] == sources


async def test_unannounced_requests_do_not_wait(service: PlanService, store: CountingStore) -> None:
    """This covers another model, and this one once all announced replicas have arrived."""
    await service.announce(scaleup(1))
    await service.plan(fork_request("other", model="other"))
    await service.plan(fork_request("announced"))
    await service.plan(fork_request("late"))
    assert [1, 1, 1] == store.plans


async def test_the_scale_up_wait_is_limited(time: FakeTime, store: CountingStore) -> None:
    """Requests that have arrived are planned; a later one is the last expected."""
    service = make_service(time, store, scaleup_wait_s=0.05)
    await service.announce(scaleup(3))
    await asyncio.gather(service.plan(fork_request("a")), service.plan(fork_request("b")))
    await service.plan(fork_request("c"))
    assert [2, 1] == store.plans


class SilentStore(CountingStore):
    """Never responds to the publication of an arrival, and notifies of plans."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__(time)
        self.planned = asyncio.Event()

    async def commit(self, change: StoreChange) -> None:
        """Apply the change, unless it is an arrival."""
        if change.instances and change.group is None:
            await asyncio.Event().wait()
        await super().commit(change)
        if change.forks:
            self.planned.set()


async def test_a_caller_that_disconnects_while_its_arrival_is_published_leaves_a_timer(time: FakeTime) -> None:
    """Otherwise its batch would stay open until another request arrives."""
    store = SilentStore(time)
    service = make_service(time, store, scaleup_wait_s=0.05)
    await service.announce(scaleup(2))
    (request,) = start_requests(service.plan(fork_request("a")))
    await run_until_idle()
    request.cancel()
    async with timeout(10):
        await store.planned.wait()
    assert [1] == store.plans


async def test_a_wait_of_zero_disables_scale_up_batches(time: FakeTime, store: CountingStore) -> None:
    """Arrivals are counted anyway."""
    service = make_service(time, store, scaleup_wait_s=0)
    await service.announce(scaleup(2))
    await service.plan(fork_request("a"))
    assert [1] == store.plans
    assert 1 == service.scaleup("up").arrived_count


async def test_each_rank_has_its_batch(service: PlanService, store: CountingStore) -> None:
    """Two replicas of two ranks make two plans of two."""
    await service.announce(scaleup(2))
    tasks = start_requests(*(service.plan(rank_request("one", rank)) for rank in RANKS))
    await run_until_idle()
    first = count_waiting(tasks)
    tasks += start_requests(service.plan(rank_request("two", RANKS[0])))
    await run_until_idle()
    second = count_waiting(tasks)
    await service.plan(rank_request("two", RANKS[1]))
    await asyncio.gather(*tasks)
    assert 2 == first
    assert 1 == second
    assert [2, 2] == store.plans


async def test_data_parallel_ranks_are_batched_too(service: PlanService, store: CountingStore) -> None:
    """They are in one group: each new replica has as many as the seeds."""
    for dp in range(2):
        await service.report(seed_report(f"seed-{dp}", rank=Rank(dp=dp)))
    await service.announce(scaleup(2))
    members = [rank_request(replica, Rank(dp=dp)) for replica in ("one", "two") for dp in range(2)]
    tasks = start_requests(*(service.plan(each) for each in members[:3]))
    await run_until_idle()
    before = count_waiting(tasks)
    await service.plan(members[3])
    await asyncio.gather(*tasks)
    assert 3 == before
    assert [4] == store.plans


async def test_a_repeated_request_waits_with_the_others(service: PlanService, store: CountingStore) -> None:
    """After a client timeout the request is repeated: it is one fork and one plan."""
    await service.announce(scaleup(2))
    tasks = start_requests(service.plan(fork_request("a")))
    await run_until_idle()
    tasks[0].cancel()
    tasks += start_requests(service.plan(fork_request("a")))
    await run_until_idle()
    before = count_waiting(tasks)
    await service.plan(fork_request("b"))
    await tasks[1]
    assert 1 == before
    assert [2] == store.plans


async def test_a_fork_that_ended_while_waiting_is_not_planned(service: PlanService, store: CountingStore) -> None:
    """It reported a fallback: no other fork is chained to it."""
    await service.report(seed_report("s", max_readers=1))
    await service.announce(scaleup(3))
    tasks = start_requests(*(service.plan(fork_request(name)) for name in "ab"))
    await run_until_idle()
    tasks[0].cancel()
    finish = ForkResult(outcome="fallback", seconds=1.0, bytes_read=0, sources={}, reasons=("away",))
    await service.finish("fork-a", finish)
    tasks += start_requests(service.plan(fork_request("c")))
    plans = await asyncio.gather(*tasks[1:])
    assert [2] == store.plans
    assert ["s", "b"] == [route.source_id for plan in plans for route in plan.routes]


async def test_an_urgent_request_counts_and_does_not_wait(service: PlanService, store: CountingStore) -> None:
    """A target with chunks of an earlier fork is the last expected replica."""
    await service.announce(scaleup(2))
    tasks = start_requests(service.plan(fork_request("a")))
    await run_until_idle()
    await service.plan(fork_request("b", (0, 3)))
    await asyncio.gather(*tasks)
    assert [1, 1] == store.plans
    assert 2 == service.scaleup("up").arrived_count


RELEASES = {
    "withdrawn": ("withdraw", 0),
    "announced with zero replicas": ("announce", 0),
    "reduced": ("announce", 1),
    "expired": ("expire", 0),
}


@pytest.mark.parametrize("how", RELEASES)
async def test_waiting_ends_when_no_replicas_are_expected(
    service: PlanService, store: CountingStore, time: FakeTime, how: str
) -> None:
    """The waiting requests are planned immediately, together."""
    what, left = RELEASES[how]
    await service.announce(scaleup(5, expires_in_s=10))
    tasks = start_requests(service.plan(fork_request("a")), service.plan(fork_request("b")))
    await run_until_idle()
    before = count_waiting(tasks)
    if what == "withdraw":
        await service.withdraw("up")
    elif what == "announce":
        await service.announce(scaleup(left))
    else:
        time.now += 11
        await service.sweep()
    if left:
        tasks += start_requests(service.plan(fork_request("c")))
    await asyncio.gather(*tasks)
    assert 2 == before
    assert [2 + left] == store.plans
    assert left == len(service.scaleups())


async def test_a_scale_up_that_expires_between_two_sweeps_releases_its_waiters(
    time: FakeTime, store: CountingStore
) -> None:
    """Waiting requests check the expiry themselves."""
    service = make_service(time, store, scaleup_wait_s=8)
    await service.announce(scaleup(2, expires_in_s=0.02))
    tasks = start_requests(service.plan(fork_request("a")))
    await run_until_idle()
    time.now += 1
    await asyncio.gather(*tasks)
    assert [1] == store.plans


async def test_an_instance_that_is_removed_while_it_waits_is_not_planned(service: PlanService) -> None:
    """Its caller gets an error, and the others get their plan."""
    await service.announce(scaleup(3))
    tasks = start_requests(service.plan(fork_request("a")), service.plan(fork_request("b")))
    await run_until_idle()
    await service.remove("a")
    await service.withdraw("up")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], ProblemError)
    assert "fork-conflict" == results[0].slug
    assert "fork-b" == getattr(results[1], "fork_id", "")
