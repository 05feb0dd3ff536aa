"""Who counts as one of those that were announced."""

from __future__ import annotations

import asyncio

import pytest

from planner.registry import Registry
from planner.scaleup_tracking import replica_key
from planner.store.base import StoreUnavailable
from planner.store.records import GroupKey
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


async def test_a_replica_of_several_pods_counts_once(registry: Registry) -> None:
    """Each of its Pods has a name of its own, and other ranks."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start_requests(
        registry.request_plan(rank_request("pod-a", RANKS[0])),
        registry.request_plan(rank_request("pod-b", RANKS[1])),
    )
    await run_until_idle()
    expected = [registry.scaleups.expected(GroupKey("m", VERSION, rank.key)) for rank in RANKS]
    assert (1, [1, 1]) == (registry.scaleups.view("up").arrived_count, expected)
    await registry.scaleups.withdraw("up")
    await asyncio.gather(*tasks)


async def test_who_was_known_before_does_not_count(registry: Registry, store: CountingStore, time: FakeTime) -> None:
    """Nor waits: one that asks again, one whose heartbeat came before, one that starts again in its place."""
    await registry.request_plan(fork_request("a"))
    await registry.report(report("b"))
    await registry.request_plan(rank_request("c"))
    time.now += 1
    await registry.scaleups.announce(scaleup(2))
    for request in (fork_request("a"), fork_request("b"), rank_request("c", start_id="1")):
        await registry.request_plan(request)
    assert ([1] * 5, 0, 2) == (
        store.plans,
        registry.scaleups.view("up").arrived_count,
        registry.scaleups.expected(GROUP),
    )


async def test_who_came_and_asks_again_counts_once(registry: Registry) -> None:
    """A re-plan, and a new start in the same place."""
    await registry.scaleups.announce(scaleup(3))
    first = start_requests(registry.request_plan(rank_request("one")))
    await run_until_idle()
    urgent = await registry.request_plan(rank_request("one", faults=(fault("x", "SourceUnavailable"),)))
    again = start_requests(registry.request_plan(rank_request("one", start_id="1")))
    await run_until_idle()
    assert ("", 1, 2) == (
        "".join(route.source_id for route in urgent.routes),
        registry.scaleups.view("up").arrived_count,
        count_waiting(first + again),
    )
    await registry.scaleups.withdraw("up")
    await asyncio.gather(*first, *again)


async def test_who_goes_on_with_a_plan_from_before_a_restart_does_not_count(registry: Registry) -> None:
    """The planner forgot it, and then was told of a scale-up: it is none of those to come."""
    await registry.scaleups.announce(scaleup(2))
    resumed = fork_request("a", (0, 3)).model_copy(update={"faults": (fault("x", "SourceUnavailable"),)})
    await registry.request_plan(resumed)
    assert 0 == registry.scaleups.view("up").arrived_count


async def test_said_again_those_count_that_have_not_come_by_then(registry: Registry) -> None:
    """Two of three came: the two that are told of then are others, and what came is not forgotten."""
    await registry.scaleups.announce(scaleup(3))
    tasks = start_requests(*(registry.request_plan(rank_request(name, RANKS[0])) for name in ("one", "two")))
    await run_until_idle()
    arrived_counts = [registry.scaleups.view("up").arrived_count]
    view = await registry.scaleups.announce(scaleup(2))
    arrived_counts.append(view.arrived_count)
    expected = [registry.scaleups.expected(GroupKey("m", VERSION, rank.key)) for rank in RANKS]
    tasks += start_requests(*(registry.request_plan(rank_request(name, RANKS[0])) for name in ("three", "four")))
    await asyncio.gather(*tasks)
    arrived_counts.append(registry.scaleups.view("up").arrived_count)
    assert ([2, 0, 2], [2, 4], True) == (arrived_counts, expected, not count_waiting(tasks))


async def test_two_scale_ups_of_one_model_add_up(registry: Registry, store: CountingStore, time: FakeTime) -> None:
    """Whoever comes counts for the one that was announced first, as long as it has place."""
    await registry.scaleups.announce(scaleup(1, "one"))
    time.now += 1
    await registry.scaleups.announce(scaleup(2, "two"))
    tasks = start_requests(registry.request_plan(fork_request("a")), registry.request_plan(fork_request("b")))
    await run_until_idle()
    arrived = [(view.scaleup.scaleup_id, view.arrived_count) for view in registry.scaleups.views()]
    await registry.request_plan(fork_request("c"))
    await asyncio.gather(*tasks)
    assert ([("one", 1), ("two", 1)], [3]) == (arrived, store.plans)


async def test_an_arrival_that_the_store_does_not_take_is_told(registry: Registry, store: CountingStore) -> None:
    """It asks again, and counts then."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start_requests(registry.request_plan(fork_request("a")))
    await run_until_idle()
    store.unavailable = True
    with pytest.raises(StoreUnavailable):
        await registry.request_plan(fork_request("b"))
    store.unavailable = False
    arrived = registry.scaleups.view("up").arrived_count
    await registry.request_plan(fork_request("b"))
    await asyncio.gather(*tasks)
    assert (1, [2]) == (arrived, store.plans)


async def test_an_id_that_is_used_for_another_model_begins_anew(registry: Registry, time: FakeTime) -> None:
    """Nobody is waited for of the first."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start_requests(registry.request_plan(fork_request("a")))
    await run_until_idle()
    view = await registry.scaleups.announce(scaleup(2, model="n"))
    await asyncio.gather(*tasks)
    assert (0, [0, 2]) == (
        view.arrived_count, [registry.scaleups.expected(GROUP._replace(model=model)) for model in "mn"],
    )  # fmt: skip


REPLICA_KEYS = [
    (rank_request("web-0"), "web-0"),
    (rank_request("a-target-b", Rank(tp=3, tp_size=8, dp=2)), "a-target-b"),
    (fork_request("by-hand", placement=Placement(host="h", pod="default/web-0")), "default/web-0"),
    (fork_request("by-hand"), "by-hand"),
    (fork_request(f"-{Rank().key}-dp0-0"), f"-{Rank().key}-dp0-0"),
]


@pytest.mark.parametrize(("request_", "expected"), REPLICA_KEYS)
def test_the_place_of_an_instance(request_: ForkRequest, expected: str) -> None:
    """What its id says before its rank, else its Pod, else itself."""
    assert expected == replica_key(request_.instance)
