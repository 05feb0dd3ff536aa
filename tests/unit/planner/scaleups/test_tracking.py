"""Arrivals that count for a scale-up."""

from __future__ import annotations

import asyncio

import pytest

from planner.core.records import GroupKey
from planner.core.scaleups import replica_key
from planner.plan_service import PlanService
from planner.store.base import StoreUnavailable
from rfork.schema import ForkRequest, Placement, Rank
from tests.unit.planner.builders import VERSION, FakeTime, fault, fork_request, report
from tests.unit.planner.records import GROUP
from tests.unit.planner.scaleups.arrivals import (
    RANKS,
    CountingStore,
    count_waiting,
    rank_request,
    run_until_idle,
    scaleup,
    start_requests,
)


async def test_a_replica_of_several_pods_counts_once(service: PlanService) -> None:
    """Each of its Pods has its own name and other ranks."""
    await service.announce(scaleup(2))
    tasks = start_requests(
        service.plan(rank_request("pod-a", RANKS[0])),
        service.plan(rank_request("pod-b", RANKS[1])),
    )
    await run_until_idle()
    expected = [service.state.scaleups.expected(GroupKey("m", VERSION, rank.key), service.now()) for rank in RANKS]
    assert 1 == service.scaleup("up").arrived_count
    assert [1, 1] == expected
    await service.withdraw("up")
    await asyncio.gather(*tasks)


async def test_instances_known_before_do_not_count(service: PlanService, store: CountingStore, time: FakeTime) -> None:
    """This covers replans, earlier heartbeats, and restarts in the same place; none of them waits."""
    await service.plan(fork_request("a"))
    await service.report(report("b"))
    await service.plan(rank_request("c"))
    time.now += 1
    await service.announce(scaleup(2))
    for request in (fork_request("a"), fork_request("b"), rank_request("c", start_id="1")):
        await service.plan(request)
    assert [1] * 5 == store.plans
    assert 0 == service.scaleup("up").arrived_count
    assert 2 == service.state.scaleups.expected(GROUP, service.now())


async def test_an_arrived_replica_counts_once(service: PlanService) -> None:
    """Replans and restarts in the same place do not count again."""
    await service.announce(scaleup(3))
    first = start_requests(service.plan(rank_request("one")))
    await run_until_idle()
    urgent = await service.plan(rank_request("one", faults=(fault("x", "SourceUnavailable"),)))
    again = start_requests(service.plan(rank_request("one", start_id="1")))
    await run_until_idle()
    assert "" == "".join(route.source_id for route in urgent.routes)
    assert 1 == service.scaleup("up").arrived_count
    assert 2 == count_waiting(first + again)
    await service.withdraw("up")
    await asyncio.gather(*first, *again)


async def test_a_fork_with_a_plan_from_before_a_restart_does_not_count(service: PlanService) -> None:
    """The planner forgot it before the scale-up was announced."""
    await service.announce(scaleup(2))
    resumed = fork_request("a", (0, 3)).model_copy(update={"faults": (fault("x", "SourceUnavailable"),)})
    await service.plan(resumed)
    assert 0 == service.scaleup("up").arrived_count


async def test_a_repeated_announcement_counts_further_replicas(service: PlanService) -> None:
    """Two of three arrived: the two announced then are others, and earlier arrivals are kept."""
    await service.announce(scaleup(3))
    tasks = start_requests(*(service.plan(rank_request(name, RANKS[0])) for name in ("one", "two")))
    await run_until_idle()
    arrived_counts = [service.scaleup("up").arrived_count]
    view = await service.announce(scaleup(2))
    arrived_counts.append(view.arrived_count)
    expected = [service.state.scaleups.expected(GroupKey("m", VERSION, rank.key), service.now()) for rank in RANKS]
    tasks += start_requests(*(service.plan(rank_request(name, RANKS[0])) for name in ("three", "four")))
    await asyncio.gather(*tasks)
    arrived_counts.append(service.scaleup("up").arrived_count)
    assert [2, 0, 2] == arrived_counts
    assert [2, 4] == expected
    assert not count_waiting(tasks)


async def test_two_scale_ups_of_one_model_add_up(service: PlanService, store: CountingStore, time: FakeTime) -> None:
    """An arrival counts for the scale-up announced first, until that is complete."""
    await service.announce(scaleup(1, "one"))
    time.now += 1
    await service.announce(scaleup(2, "two"))
    tasks = start_requests(service.plan(fork_request("a")), service.plan(fork_request("b")))
    await run_until_idle()
    arrived = [(view.scaleup.scaleup_id, view.arrived_count) for view in service.scaleups()]
    await service.plan(fork_request("c"))
    await asyncio.gather(*tasks)
    assert [("one", 1), ("two", 1)] == arrived
    assert [3] == store.plans


async def test_a_failed_store_write_of_an_arrival_is_reported(service: PlanService, store: CountingStore) -> None:
    """A retry counts."""
    await service.announce(scaleup(2))
    tasks = start_requests(service.plan(fork_request("a")))
    await run_until_idle()
    store.unavailable = True
    with pytest.raises(StoreUnavailable):
        await service.plan(fork_request("b"))
    store.unavailable = False
    arrived = service.scaleup("up").arrived_count
    await service.plan(fork_request("b"))
    await asyncio.gather(*tasks)
    assert 1 == arrived
    assert [2] == store.plans


async def test_an_id_reused_for_another_model_starts_over(service: PlanService, time: FakeTime) -> None:
    """No replicas of the first model are expected."""
    await service.announce(scaleup(2))
    tasks = start_requests(service.plan(fork_request("a")))
    await run_until_idle()
    view = await service.announce(scaleup(2, model="n"))
    await asyncio.gather(*tasks)
    assert 0 == view.arrived_count
    assert [0, 2] == [service.state.scaleups.expected(GROUP._replace(model=model), service.now()) for model in "mn"]


REPLICA_KEYS = [
    (rank_request("web-0"), "web-0"),
    (rank_request("a-main-b", Rank(tp=3, tp_size=8, dp=2)), "a-main-b"),
    (fork_request("by-hand", placement=Placement(host="h", pod="default/web-0")), "default/web-0"),
    (fork_request("by-hand"), "by-hand"),
    (fork_request(f"-{Rank().key}-dp0-0"), f"-{Rank().key}-dp0-0"),
]


@pytest.mark.parametrize(("request_", "expected"), REPLICA_KEYS)
def test_the_id_or_the_pod_identifies_a_replica(request_: ForkRequest, expected: str) -> None:
    """It is the id's part before the rank, else the Pod, else the id."""
    assert expected == replica_key(request_.instance)
