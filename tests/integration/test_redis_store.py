"""Replicas of the store against one real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from planner.leases import Clock
from planner.store import keyspace
from planner.store.base import Change, Conflict, StoreUnavailable
from planner.store.redis import RedisStore
from rfork.wire import ForkFinish
from tests.processes import RedisServer
from tests.unit.planner.records import GROUP, fork, instance

TIMEOUT_S = 1.0
MakeStore = Callable[..., RedisStore]


@pytest.fixture
async def make(redis_server: RedisServer) -> AsyncIterator[MakeStore]:
    """Makes replicas of one store; each is stopped when the test ends."""
    made: list[RedisStore] = []

    def make(*, keep_forks: int = 10, clock: Clock | None = None, timeout_s: float = TIMEOUT_S) -> RedisStore:
        made.append(
            RedisStore(redis_server.url, clock or Clock(), keep_forks=keep_forks, timeout_s=timeout_s)
        )
        return made[-1]

    yield make
    for store in made:
        await store.stop()


def key(name: str) -> str:
    """What the store calls one of its keys, which change with the format of records."""
    return f"{{rfork}}:{keyspace.FORMAT}:{name}"


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what a replica finds out by itself; TimeoutError where it does not."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def instances_of(store: RedisStore) -> list[str]:
    """Ids of the instances in its state."""
    return sorted(record.report.instance_id for record in store.state.instances())


def forks_of(store: RedisStore) -> list[str]:
    """Ids of the forks in its state, whatever order it heard of them in."""
    return sorted(record.fork_id for record in store.state.forks())


async def tell(server: RedisServer, *words: str | int) -> None:
    """Have Redis do what no planner asks for."""
    async with Redis.from_url(server.url, protocol=2) as admin:
        await admin.execute_command(*words)


async def plan(store: RedisStore, fork_id: str) -> int:
    """Commit a fork on the version that is known, until no other replica is quicker; that version."""
    while True:
        await until(lambda: store.ready)
        version = store.version(GROUP)
        with contextlib.suppress(Conflict, StoreUnavailable):
            await store.commit(Change(forks=(fork(fork_id),), group=GROUP, version=version))
            return version


async def test_two_replicas_see_what_the_other_does(make: MakeStore) -> None:
    """Instances, forks, versions, and what is gone; the record is the same on both sides."""
    one, other = make(), make()
    await one.start()
    await other.start()
    await one.commit(Change(instances=(instance("a"), instance("b")), forks=(fork("f"),), group=GROUP))
    await until(lambda: other.version(GROUP) == 1)
    await other.commit(Change(instances=(replace(instance("a"), drained=True),), gone=("b",)))
    await until(lambda: instances_of(one) == ["a"])
    expected = ([replace(instance("a"), drained=True)], [fork("f")], 1)
    assert [expected] * 2 == [
        (store.state.instances(), store.state.forks(), store.version(GROUP)) for store in (one, other)
    ]


async def test_what_one_commits_it_sees_at_once(make: MakeStore) -> None:
    """And once: the stream brings it again."""
    store, heard = make(), list[str]()
    await store.start()
    store.state.subscribe(lambda record: heard.append(record.fork_id))
    await plan(store, "a")
    seen = forks_of(store)
    await plan(store, "b")
    assert (["a"], ["a", "b"]) == (seen, heard)


async def test_of_two_commits_on_one_version_one_wins(make: MakeStore) -> None:
    """The other is refused whole, and knows by then what the first one did."""
    one, other = make(), make()
    await one.start()
    await other.start()
    first = Change(forks=(fork("first"),), group=GROUP, version=0)
    second = Change(instances=(instance("late"),), forks=(fork("second"),), group=GROUP, version=0)
    outcomes = await asyncio.gather(one.commit(first), other.commit(second), return_exceptions=True)
    refused = [type(outcome) for outcome in outcomes if outcome is not None]
    loser, expected = (other, ([], ["first"], 1)) if outcomes[0] is None else (one, (["late"], ["second"], 1))
    assert ([Conflict], expected) == (refused, (instances_of(loser), forks_of(loser), loser.version(GROUP)))


async def test_no_version_is_used_twice(make: MakeStore) -> None:
    """Two hundred commits on two replicas at a time: each has a version of its own, and none is lost."""
    stores = [make(keep_forks=1000), make(keep_forks=1000)]
    for store in stores:
        await store.start()
    used = await asyncio.gather(*(plan(stores[index % 2], f"f{index}") for index in range(200)))
    await until(lambda: all(store.version(GROUP) == 200 for store in stores))
    expected = sorted(f"f{index}" for index in range(200))
    assert (list(range(200)), [expected] * 2) == (
        sorted(used), [forks_of(store) for store in stores],
    )  # fmt: skip


async def test_changes_of_one_record_at_one_time_are_both_kept(make: MakeStore) -> None:
    """A drain through one replica and a heartbeat through the other, made from the same record."""
    one, other = make(), make()
    await one.start()
    await one.commit(Change(instances=(instance("a"),), forks=(fork("f"),)))
    await other.start()
    await asyncio.gather(
        one.commit(Change(instances=(replace(instance("a"), drained=True),), forks=(fork("f", lost=True),))),
        other.commit(
            Change(instances=(replace(instance("a"), seen_at=9.0),), forks=(fork("f", seen_at=9.0),))
        ),
    )
    third = make()
    await third.start()
    expected = (replace(instance("a"), seen_at=9.0, drained=True), fork("f", seen_at=9.0, lost=True))
    await until(lambda: one.state.instance("a") == other.state.instance("a") == expected[0])
    assert [expected] * 3 == [
        (each.state.instance("a"), each.state.fork("f")) for each in (one, other, third)
    ]


async def test_a_heartbeat_of_an_instance_that_is_gone_brings_it_whole(
    make: MakeStore, redis_server: RedisServer
) -> None:
    """One number would be a torn record: the replica that still knew the rest sends that too."""
    one, other = make(), make()
    await one.start()
    await one.commit(Change(instances=(instance("a"),), forks=(fork("f"),)))
    await other.start()
    await tell(redis_server, "DEL", key("instances"), key("forks"))
    heard = replace(instance("a"), seen_at=9.0)
    await other.commit(Change(instances=(heard,), forks=(fork("f", seen_at=9.0),)))
    third = make()
    await third.start()
    await until(lambda: one.state.instances() == [heard])
    expected = ([heard], [fork("f", seen_at=9.0)])
    assert [expected] * 3 == [(store.state.instances(), store.state.forks()) for store in (one, other, third)]


async def test_a_replica_that_starts_later_knows_everything(make: MakeStore) -> None:
    """Ended forks as many as are kept, in the order of their end; ages are those of the first replica."""
    one = make(keep_forks=2)
    await one.start()
    seen_at = one.now() - 5
    await one.commit(Change(instances=(replace(instance("a"), seen_at=seen_at),), forks=(fork("live"),)))
    for name in ("x", "z", "y"):
        await one.commit(Change(forks=(fork(name),)))
        await one.commit(Change(forks=(fork(name, ended=True),)))
    await plan(one, "planned")
    later = make(keep_forks=2)
    await later.start()
    record = later.state.instance("a")
    assert (["live", "planned", "y", "z"], one.version(GROUP), seen_at) == (
        forks_of(later), later.version(GROUP), record.seen_at if record else None,
    )  # fmt: skip
    assert pytest.approx(one.now() - seen_at, abs=2) == later.now() - seen_at


async def test_what_forks_told_outlives_their_instances(make: MakeStore) -> None:
    """At the replica that saw it, at the one that follows, and at one that starts later."""
    one, other = make(), make()
    await one.start()
    await other.start()
    took = {"snapshot:file:///x": 9.0, "s": 2.0}
    await one.commit(Change(instances=(instance("s"),), forks=tuple(fork(name) for name in took)))
    for source, seconds in took.items():
        finish = ForkFinish(outcome="forked", seconds=seconds, bytes_read=1, sources={source: 1})
        await other.commit(Change(forks=(fork(source, finish=finish),)))
    await one.commit(Change(gone=("s",)))
    later = make()
    await later.start()
    await until(lambda: not other.state.groups())
    assert [([], [7.0])] * 3 == [
        (store.state.groups(), [past.saved_s for past in store.state.pasts()])
        for store in (one, other, later)
    ]


async def test_ages_do_not_depend_on_the_machines_clocks(make: MakeStore) -> None:
    """Machines that were booted at other times, with other ideas of the date, agree."""
    one = make(clock=Clock(monotonic=lambda: 5e6, unix=lambda: 0.0))
    other = make(clock=Clock(monotonic=lambda: 12.0, unix=lambda: 9e9))
    await one.start()
    await other.start()
    assert one.now() == other.now()


async def test_a_redis_that_dies_is_told_and_comes_back_empty(
    make: MakeStore, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Each commit fails in time with one clear line; afterwards the old state is gone and commits hold."""
    caplog.set_level(logging.INFO)
    one, other = make(), make()
    await one.start()
    await other.start()
    await one.commit(Change(instances=(instance("a"),), forks=(fork("f"),), group=GROUP))
    redis_server.kill()
    with pytest.raises(
        StoreUnavailable, match=rf"^the store at 127.0.0.1:{redis_server.port} cannot be used: "
    ):
        await one.commit(Change(instances=(instance("b"),)))
    await until(lambda: not one.ready and not other.ready)
    kept = instances_of(one)
    with pytest.raises(StoreUnavailable):
        await other.commit(Change(gone=("a",)))
    redis_server.start()
    await until(lambda: one.ready and other.ready)
    emptied = (instances_of(one), forks_of(other), one.version(GROUP))
    await one.commit(Change(instances=(instance("c"),)))
    await until(lambda: instances_of(other) == ["c"])
    told = [record.getMessage().partition(" ")[2].partition(" ")[0] for record in caplog.records]
    assert (["a"], ([], [], 0), ["c"]) == (kept, emptied, instances_of(one))
    assert {"cannot", "was", "is"} == set(told)


async def test_a_redis_that_hangs_is_told_within_the_timeout(
    make: MakeStore, redis_server: RedisServer
) -> None:
    """SIGSTOP: connections stay open and nothing answers; when it goes on, nothing was lost."""
    store = make()
    await store.start()
    await store.commit(Change(instances=(instance("a"),)))
    redis_server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(TIMEOUT_S * 3):
            with pytest.raises(StoreUnavailable, match="cannot be used"):
                await store.commit(Change(instances=(instance("b"),)))
            await until(lambda: not store.ready)
    finally:
        redis_server.signal(signal.SIGCONT)
    await until(lambda: store.ready)
    await store.commit(Change(instances=(instance("c"),)))
    assert {"a", "c"} == set(instances_of(store)) - {"b"}


async def test_a_flush_begins_a_new_epoch(make: MakeStore, redis_server: RedisServer) -> None:
    """Redis lives on and answers, but what it held is gone: both replicas start anew."""
    one, other = make(), make()
    await one.start()
    await other.start()
    await one.commit(Change(instances=(instance("a"),), forks=(fork("f"),), group=GROUP))
    await until(lambda: instances_of(other) == ["a"])
    await tell(redis_server, "FLUSHALL")
    await one.commit(Change(instances=(instance("b"),)))
    await until(lambda: instances_of(one) == instances_of(other) == ["b"])
    assert ([], [], 0, 0) == (forks_of(one), forks_of(other), one.version(GROUP), other.version(GROUP))


async def test_connections_that_are_cut_lose_nothing(make: MakeStore, redis_server: RedisServer) -> None:
    """Redis keeps what it has; the clock does not go back, and a version that was used stays used."""
    one, other = make(), make()
    await one.start()
    await other.start()
    await one.commit(Change(instances=(instance("a"),), forks=(fork("f"),), group=GROUP))
    before = one.now()
    await tell(redis_server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    versions = [await plan(one, "g"), await plan(other, "h")]
    await until(lambda: one.version(GROUP) == other.version(GROUP) == 3)
    assert [1, 2] == versions
    assert [(["a"], ["f", "g", "h"], 3)] * 2 == [
        (instances_of(store), forks_of(store), store.version(GROUP)) for store in (one, other)
    ]
    assert before <= one.now()


async def test_a_replica_that_fell_too_far_behind_reads_everything_anew(
    make: MakeStore, redis_server: RedisServer
) -> None:
    """The stream does not go back to where it stands: its commit still holds, once it caught up."""
    one, other = make(), make()
    await one.start()
    await one.commit(Change(instances=(instance("a"),)))
    await other.start()
    await tell(redis_server, "HINCRBY", key("meta"), "number", 5)
    await asyncio.gather(
        one.commit(Change(instances=(instance("b"),))), other.commit(Change(instances=(instance("c"),)))
    )
    await until(lambda: instances_of(one) == instances_of(other))
    assert ["a", "b", "c"] == instances_of(one)


async def test_the_stream_is_bounded_in_bytes(
    make: MakeStore, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large reports are; whoever it does not go back far enough for loads everything."""
    monkeypatch.setattr(keyspace, "KEEP_BYTES", 20_000)
    one, other = make(), make()
    await one.start()
    await other.start()
    largest, bytes_kept = 0, 0
    async with Redis.from_url(redis_server.url, protocol=2) as admin:
        for number in range(60):
            readers = tuple(f"{number}-{which:0100}" for which in range(number))
            await one.commit(Change(instances=(instance("a", readers=readers),)))
            entries = await admin.execute_command("XRANGE", key("changes"), "-", "+")
            kept = [len(fields[b"body"]) for _, fields in entries]
            largest, bytes_kept = max(largest, *kept), max(bytes_kept, sum(kept))
    await until(lambda: other.state.instance("a") == one.state.instance("a"))
    assert (True, True) == (10_000 < bytes_kept, bytes_kept <= 20_000 + largest)


async def test_versions_of_empty_groups_are_forgotten(make: MakeStore, redis_server: RedisServer) -> None:
    """Models come and go; a plan from before its group was forgotten is refused, by every replica."""
    one, other = make(), make()
    await one.start()
    await other.start()
    stale = one.version(GROUP)
    seen: list[int] = []
    async with Redis.from_url(redis_server.url, protocol=2) as admin:
        for _ in range(3):
            seen.append(one.version(GROUP))
            change = Change((instance("a"),), (fork("f", instance_id="a"),), group=GROUP, version=seen[-1])
            await one.commit(change)
            seen.append(one.version(GROUP))
            await one.commit(Change(forks=(fork("f", instance_id="a", ended=True),), gone=("a",)))
        kept = await admin.hlen(key("versions"))
    third = make()
    await third.start()
    await until(lambda: other.version(GROUP) == one.version(GROUP))
    refused = []
    for store in (one, other, third):
        with pytest.raises(Conflict):
            await store.commit(Change(forks=(fork("g"),), group=GROUP, version=stale))
        refused.append(store.version(GROUP))
    assert (0, seen, [one.version(GROUP)] * 3) == (kept, sorted(set(seen)), refused)


async def test_a_redis_that_takes_no_writes_is_not_ready(make: MakeStore, redis_server: RedisServer) -> None:
    """A Redis that became the read-only copy of another: told, and mended by itself."""
    store = make()
    await store.start()
    await tell(redis_server, "REPLICAOF", "127.0.0.1", 1)
    await until(lambda: not store.ready)
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        await store.commit(Change(instances=(instance("a"),)))
    refused = store.ready
    await tell(redis_server, "REPLICAOF", "NO", "ONE")
    await until(lambda: store.ready)
    await store.commit(Change(instances=(instance("a"),)))
    assert (False, ["a"]) == (refused, instances_of(store))


async def test_a_stopped_store_refuses_and_leaves_no_connection(
    make: MakeStore, redis_server: RedisServer
) -> None:
    """What is under way is refused too."""
    store = make()
    await store.start()
    redis_server.signal(signal.SIGSTOP)
    try:
        under_way = asyncio.create_task(store.commit(Change(instances=(instance("a"),))))
        await asyncio.sleep(0)
        await store.stop()
        with pytest.raises(StoreUnavailable):
            await under_way
    finally:
        redis_server.signal(signal.SIGCONT)
    with pytest.raises(StoreUnavailable, match="stopped"):
        await store.commit(Change(instances=(instance("a"),)))
    async with Redis.from_url(redis_server.url, protocol=2) as admin, asyncio.timeout(20):
        while len(await admin.client_list()) > 1:
            await asyncio.sleep(0.01)
    assert not store.ready


async def test_a_start_without_redis_says_where_it_looked(make: MakeStore, redis_server: RedisServer) -> None:
    """Host and port, never the password; it connects by itself as soon as there is a Redis."""
    redis_server.kill()
    url = redis_server.url.replace("redis://", "redis://default:hush@")
    store = RedisStore(url, Clock(), keep_forks=1, timeout_s=TIMEOUT_S)
    where = rf"^the store at 127\.0\.0\.1:{redis_server.port} cannot be used: "
    try:
        with pytest.raises(StoreUnavailable, match=where) as error:
            await store.start()
        with pytest.raises(StoreUnavailable, match=where):
            await store.commit(Change(instances=(instance("a"),)))
        refused = store.ready
        redis_server.start("--requirepass", "hush")
        await until(lambda: store.ready)
        await store.commit(Change(instances=(instance("a"),)))
    finally:
        await store.stop()
    assert (False, ["a"]) == (refused, instances_of(store))
    assert [] == [word for word in ("hush", "\n") if word in str(error.value)]
