"""Replicas of the store against one real Redis."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from planner.clock import Clock
from planner.core.records import StoreChange
from planner.store.base import CommitConflict
from rfork.schema import ForkResult, ImageKey
from tests.integration.redis_store.stores import (
    MakeStore,
    forks_of,
    instances_of,
    key,
    plan,
    send_command,
    until,
)
from tests.processes import RedisServer
from tests.unit.planner.records import GROUP, fork, holder, instance, scaleup


async def test_two_replicas_see_what_the_other_does(make: MakeStore) -> None:
    """Instances, forks, versions and removals; the record is the same on both sides."""
    one, other = make(), make()
    await one.start()
    await other.start()
    await one.commit(StoreChange(instances=(instance("a"), instance("b")), forks=(fork("f"),), group=GROUP))
    await until(lambda: other.version(GROUP) == 1)
    await other.commit(StoreChange(instances=(replace(instance("a"), drained=True),), removed=("b",)))
    await until(lambda: instances_of(one) == ["a"])
    expected = ([replace(instance("a"), drained=True)], [fork("f")], 1)
    assert [expected] * 2 == [
        (store.state.instances(), store.state.forks(), store.version(GROUP)) for store in (one, other)
    ]


async def test_a_replica_learns_its_lag_from_a_change(make: MakeStore) -> None:
    """A replica that loaded old state commits nothing: new requests came after the change."""
    ahead_s = 0.0
    one, other = make(clock=Clock(monotonic=lambda: time.monotonic() + ahead_s)), make()
    await one.start()
    await other.start()
    ahead_s = 5.0
    announced = replace(scaleup("up", 4), first_at=one.now())
    await one.commit(StoreChange(scaleups=(announced,)))
    await until(lambda: other.state.scaleups.record("up") is not None)
    assert announced.first_at <= other.now()


async def test_a_commit_is_visible_immediately(make: MakeStore) -> None:
    """It is applied once although the stream delivers it again."""
    store, notifications = make(), list[str]()
    await store.start()
    store.state.subscribe(lambda record: notifications.append(record.fork_id))
    await plan(store, "a")
    seen = forks_of(store)
    await plan(store, "b")
    assert ["a"] == seen
    assert ["a", "b"] == notifications


async def test_of_two_commits_on_one_version_one_wins(make: MakeStore) -> None:
    """The other is refused completely, and has applied the first one by then."""
    one, other = make(), make()
    await one.start()
    await other.start()
    first = StoreChange(forks=(fork("first"),), group=GROUP, version=0)
    second = StoreChange(instances=(instance("late"),), forks=(fork("second"),), group=GROUP, version=0)
    outcomes = await asyncio.gather(one.commit(first), other.commit(second), return_exceptions=True)
    refused = [type(outcome) for outcome in outcomes if outcome is not None]
    loser, expected = (other, ([], ["first"], 1)) if outcomes[0] is None else (one, (["late"], ["second"], 1))
    assert [CommitConflict] == refused
    assert expected == (instances_of(loser), forks_of(loser), loser.version(GROUP))


async def test_no_version_is_used_twice(make: MakeStore) -> None:
    """Two hundred concurrent commits on two replicas: each gets a unique version, and none is lost."""
    stores = [make(max_finished_forks=1000), make(max_finished_forks=1000)]
    for store in stores:
        await store.start()
    used = await asyncio.gather(*(plan(stores[index % 2], f"f{index}") for index in range(200)))
    await until(lambda: all(store.version(GROUP) == 200 for store in stores))
    expected = sorted(f"f{index}" for index in range(200))
    assert list(range(200)) == sorted(used)
    assert [expected] * 2 == [forks_of(store) for store in stores]


async def test_concurrent_changes_of_one_record_are_both_kept(make: MakeStore) -> None:
    """A drain through one replica and a heartbeat through the other, both based on the same record."""
    one, other = make(), make()
    await one.start()
    await one.commit(StoreChange(instances=(instance("a"),), forks=(fork("f"),)))
    await other.start()
    await asyncio.gather(
        one.commit(StoreChange(instances=(replace(instance("a"), drained=True),), forks=(fork("f", abandoned=True),))),
        other.commit(StoreChange(instances=(replace(instance("a"), seen_at=9.0),), forks=(fork("f", seen_at=9.0),))),
    )
    third = make()
    await third.start()
    expected = (replace(instance("a"), seen_at=9.0, drained=True), fork("f", seen_at=9.0, abandoned=True))
    await until(lambda: one.state.instance("a") == other.state.instance("a") == expected[0])
    assert [expected] * 3 == [(each.state.instance("a"), each.state.fork("f")) for each in (one, other, third)]


async def test_a_heartbeat_of_a_removed_instance_restores_all_of_it(make: MakeStore, redis_server: RedisServer) -> None:
    """A heartbeat alone would be a torn record: the replica that still knew the rest sends it too."""
    one, other = make(), make()
    await one.start()
    await one.commit(StoreChange(instances=(instance("a"),), forks=(fork("f"),)))
    await other.start()
    await send_command(redis_server, "DEL", key("instances"), key("forks"))
    notifications = replace(instance("a"), seen_at=9.0)
    await other.commit(StoreChange(instances=(notifications,), forks=(fork("f", seen_at=9.0),)))
    third = make()
    await third.start()
    await until(lambda: one.state.instances() == [notifications])
    expected = ([notifications], [fork("f", seen_at=9.0)])
    assert [expected] * 3 == [(store.state.instances(), store.state.forks()) for store in (one, other, third)]


async def test_a_replica_that_starts_later_loads_everything(make: MakeStore) -> None:
    """It has as many finished forks as are kept, in the order of their end; ages are those of the first
    replica.
    """
    one = make(max_finished_forks=2)
    await one.start()
    seen_at = one.now() - 5
    await one.commit(StoreChange(instances=(replace(instance("a"), seen_at=seen_at),), forks=(fork("live"),)))
    for name in ("x", "z", "y"):
        await one.commit(StoreChange(forks=(fork(name),)))
        await one.commit(StoreChange(forks=(fork(name, ended=True),)))
    await plan(one, "planned")
    later = make(max_finished_forks=2)
    await later.start()
    # Each poll of Redis returns the time of the most advanced replica.
    await until(lambda: abs(one.now() - later.now()) < 2)
    record = later.state.instance("a")
    assert ["live", "planned", "y", "z"] == forks_of(later)
    assert one.version(GROUP) == later.version(GROUP)
    assert seen_at == (record.seen_at if record else None)


async def test_holders_are_shared_and_loaded(make: MakeStore) -> None:
    """A replica sees those that the other stores and removes, and loads them when it starts."""
    one, other = make(), make()
    await one.start()
    await other.start()
    record = replace(holder("h"), prefetched=(ImageKey("m", "v1", "r", "a" * 32),))
    await one.commit(StoreChange(holders=(record, holder("gone"))))
    await until(lambda: other.state.holders.get("h") is not None)
    await other.commit(StoreChange(removed_holders=("gone",)))
    later = make()
    await later.start()
    assert [record] == other.state.holders.all()
    assert [record] == later.state.holders.all()


async def test_fork_reports_outlive_their_instances(make: MakeStore) -> None:
    """At the replica that received them, at the one that follows, and at one that starts later."""
    one, other = make(), make()
    await one.start()
    await other.start()
    seconds_by_source = {"snapshot:file:///x": 9.0, "s": 2.0}
    await one.commit(StoreChange(instances=(instance("s"),), forks=tuple(fork(name) for name in seconds_by_source)))
    for source, seconds in seconds_by_source.items():
        finish = ForkResult(outcome="forked", seconds=seconds, bytes_read=1, sources={source: 1})
        await other.commit(StoreChange(forks=(fork(source, finish=finish),)))
    await one.commit(StoreChange(removed=("s",)))
    later = make()
    await later.start()
    await until(lambda: not other.state.groups())
    assert [([], [7.0])] * 3 == [
        (store.state.groups(), [past.seconds_saved for past in store.state.histories()])
        for store in (one, other, later)
    ]


async def test_ages_do_not_depend_on_the_machines_clocks(make: MakeStore) -> None:
    """Machines with different boot times and dates agree."""
    one = make(clock=Clock(monotonic=lambda: 5e6, unix=lambda: 0.0))
    other = make(clock=Clock(monotonic=lambda: 12.0, unix=lambda: 9e9))
    await one.start()
    await other.start()
    assert one.now() == other.now()
