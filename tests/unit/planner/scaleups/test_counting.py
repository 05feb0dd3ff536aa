"""Who counts as one of those that were announced."""

from __future__ import annotations

import asyncio

import pytest

from planner.arrivals import place_of
from planner.registry import Registry
from planner.store.base import StoreUnavailable
from planner.store.records import GroupKey
from rfork.wire import ForkRequest, Placement, Rank
from tests.unit.planner.builders import VERSION, FakeTime, ask, fault, report
from tests.unit.planner.records import GROUP
from tests.unit.planner.scaleups.arriving import RANKS, CountingStore, idle, member, scaleup, start, waiting


async def test_a_replica_of_several_pods_counts_once(registry: Registry) -> None:
    """Each of its Pods has a name of its own, and other ranks."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start(registry.ask(member("pod-a", RANKS[0])), registry.ask(member("pod-b", RANKS[1])))
    await idle()
    expected = [registry.scaleups.expected(GroupKey("m", VERSION, rank.key)) for rank in RANKS]
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
        registry.scaleups.expected(GROUP),
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


async def test_who_goes_on_with_a_plan_from_before_a_restart_does_not_count(registry: Registry) -> None:
    """The planner forgot it, and then was told of a scale-up: it is none of those to come."""
    await registry.scaleups.announce(scaleup(2))
    going = ask("a", (0, 3)).model_copy(update={"faults": (fault("x", "SourceGone"),)})
    await registry.ask(going)
    assert 0 == registry.scaleups.view("up").arrived


async def test_said_again_those_count_that_have_not_come_by_then(registry: Registry) -> None:
    """Two of three came: the two that are told of then are others, and what came is not forgotten."""
    await registry.scaleups.announce(scaleup(3))
    tasks = start(*(registry.ask(member(name, RANKS[0])) for name in ("one", "two")))
    await idle()
    told = [registry.scaleups.view("up").arrived]
    view = await registry.scaleups.announce(scaleup(2))
    told.append(view.arrived)
    expected = [registry.scaleups.expected(GroupKey("m", VERSION, rank.key)) for rank in RANKS]
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


async def test_an_id_that_is_used_for_another_model_begins_anew(registry: Registry, time: FakeTime) -> None:
    """Nobody is waited for of the first."""
    await registry.scaleups.announce(scaleup(2))
    tasks = start(registry.ask(ask("a")))
    await idle()
    view = await registry.scaleups.announce(scaleup(2, model="n"))
    await asyncio.gather(*tasks)
    assert (0, [0, 2]) == (
        view.arrived, [registry.scaleups.expected(GROUP._replace(model=model)) for model in "mn"],
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
