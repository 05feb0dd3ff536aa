"""A real Redis that dies, hangs, loses data or refuses writes, and replicas of the store."""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest
from redis.asyncio import Redis

from planner.clock import Clock
from planner.core.records import StoreChange
from planner.store import redis
from planner.store.base import CommitConflict, StoreUnavailable
from planner.store.redis import RedisStore
from rfork.asyncio_timeout import timeout
from tests.integration.redis_store.stores import (
    TIMEOUT_S,
    MakeStore,
    forks_of,
    instances_of,
    key,
    plan,
    send_command,
    until,
)
from tests.processes import RedisServer
from tests.unit.planner.records import GROUP, fork, instance


async def test_a_redis_that_dies_is_reported_and_comes_back_empty(
    make: MakeStore, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Each commit fails in time with one clear line; afterwards the old state is removed and commits succeed."""
    caplog.set_level(logging.INFO)
    one, other = make(), make()
    await one.start()
    await other.start()
    await one.commit(StoreChange(instances=(instance("a"),), forks=(fork("f"),), group=GROUP))
    redis_server.kill()
    with pytest.raises(StoreUnavailable, match=rf"^the store at 127.0.0.1:{redis_server.port} is unavailable: "):
        await one.commit(StoreChange(instances=(instance("b"),)))
    await until(lambda: not one.ready and not other.ready)
    kept = instances_of(one)
    with pytest.raises(StoreUnavailable):
        await other.commit(StoreChange(removed=("a",)))
    redis_server.start()
    await until(lambda: one.ready and other.ready)
    emptied = (instances_of(one), forks_of(other), one.version(GROUP))
    await one.commit(StoreChange(instances=(instance("c"),)))
    await until(lambda: instances_of(other) == ["c"])
    messages = [" ".join(record.getMessage().split()[:2]) for record in caplog.records]
    assert ["a"] == kept
    assert ([], [], 0) == emptied
    assert ["c"] == instances_of(one)
    assert {"store ready", "store unavailable", "store was"} == set(messages)


async def test_a_redis_that_hangs_is_reported_within_the_timeout(make: MakeStore, redis_server: RedisServer) -> None:
    """SIGSTOP: connections stay open and get no response; when it continues, nothing was lost."""
    store = make(timeout_s=4.0)
    await store.start()
    await store.commit(StoreChange(instances=(instance("a"),)))
    redis_server.signal(signal.SIGSTOP)
    try:
        async with timeout(2 * TIMEOUT_S):
            with pytest.raises(StoreUnavailable, match="is unavailable"):
                await store.commit(StoreChange(instances=(instance("b"),)))
            await until(lambda: not store.ready)
    finally:
        redis_server.signal(signal.SIGCONT)
    await until(lambda: store.ready)
    await store.commit(StoreChange(instances=(instance("c"),)))
    assert {"a", "c"} == set(instances_of(store)) - {"b"}


async def test_a_flush_begins_a_new_epoch(make: MakeStore, redis_server: RedisServer) -> None:
    """Redis keeps running but has lost its data: both replicas start again from nothing."""
    one, other = make(), make()
    await one.start()
    await other.start()
    await one.commit(StoreChange(instances=(instance("a"),), forks=(fork("f"),), group=GROUP))
    await until(lambda: instances_of(other) == ["a"])
    await send_command(redis_server, "FLUSHALL")
    await one.commit(StoreChange(instances=(instance("b"),)))
    await until(lambda: instances_of(one) == instances_of(other) == ["b"])
    assert [] == forks_of(one)
    assert [] == forks_of(other)
    assert 0 == one.version(GROUP)
    assert 0 == other.version(GROUP)


async def test_connections_that_are_cut_lose_nothing(make: MakeStore, redis_server: RedisServer) -> None:
    """Redis keeps its data; the clock does not go back, and a used version stays used."""
    one, other = make(), make()
    await one.start()
    await other.start()
    await one.commit(StoreChange(instances=(instance("a"),), forks=(fork("f"),), group=GROUP))
    before = one.now()
    await send_command(redis_server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    versions = [await plan(one, "g"), await plan(other, "h")]
    await until(lambda: one.version(GROUP) == other.version(GROUP) == 3)
    assert [1, 2] == versions
    assert [(["a"], ["f", "g", "h"], 3)] * 2 == [
        (instances_of(store), forks_of(store), store.version(GROUP)) for store in (one, other)
    ]
    assert before <= one.now()


async def test_a_replica_that_lags_too_far_reloads_everything(make: MakeStore, redis_server: RedisServer) -> None:
    """The stream no longer reaches back to its position: its commit still succeeds once it has caught up."""
    one, other = make(), make()
    await one.start()
    await one.commit(StoreChange(instances=(instance("a"),)))
    await other.start()
    await send_command(redis_server, "HINCRBY", key("meta"), "number", 5)
    await asyncio.gather(
        one.commit(StoreChange(instances=(instance("b"),))),
        other.commit(StoreChange(instances=(instance("c"),))),
    )
    await until(lambda: instances_of(one) == instances_of(other))
    assert ["a", "b", "c"] == instances_of(one)


async def test_the_stream_is_bounded_in_bytes(
    make: MakeStore, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound holds for reports of any size; a replica that lags further than the stream loads everything."""
    monkeypatch.setattr(redis, "KEEP_BYTES", 20_000)
    one, other = make(), make()
    await one.start()
    await other.start()
    max_entries, bytes_kept = 0, 0
    async with Redis.from_url(redis_server.url, protocol=2) as admin:
        for number in range(60):
            readers = tuple(f"{number}-{which:0100}" for which in range(number))
            await one.commit(StoreChange(instances=(instance("a", readers=readers),)))
            entries = await admin.execute_command("XRANGE", key("changes"), "-", "+")
            kept = [len(fields[b"body"]) for _, fields in entries]
            max_entries, bytes_kept = max(max_entries, *kept), max(bytes_kept, sum(kept))
    await until(lambda: other.state.instance("a") == one.state.instance("a"))
    assert 10_000 < bytes_kept
    assert bytes_kept <= 20_000 + max_entries


async def test_versions_of_empty_groups_are_forgotten(make: MakeStore, redis_server: RedisServer) -> None:
    """Models come and go; every replica refuses a plan from before its group was forgotten."""
    one, other = make(), make()
    await one.start()
    await other.start()
    stale = one.version(GROUP)
    seen: list[int] = []
    async with Redis.from_url(redis_server.url, protocol=2) as admin:
        for _ in range(3):
            seen.append(one.version(GROUP))
            change = StoreChange((instance("a"),), (fork("f", instance_id="a"),), group=GROUP, version=seen[-1])
            await one.commit(change)
            seen.append(one.version(GROUP))
            await one.commit(StoreChange(forks=(fork("f", instance_id="a", ended=True),), removed=("a",)))
        kept = await admin.hlen(key("versions"))
    third = make()
    await third.start()
    await until(lambda: other.version(GROUP) == one.version(GROUP))
    refused = []
    for store in (one, other, third):
        with pytest.raises(CommitConflict):
            await store.commit(StoreChange(forks=(fork("g"),), group=GROUP, version=stale))
        refused.append(store.version(GROUP))
    assert 0 == kept
    assert seen == sorted(set(seen))
    assert [one.version(GROUP)] * 3 == refused


async def test_a_redis_that_rejects_writes_is_not_ready(make: MakeStore, redis_server: RedisServer) -> None:
    """A Redis that became a read-only replica of another is reported, and recovers automatically."""
    store = make()
    await store.start()
    await send_command(redis_server, "REPLICAOF", "127.0.0.1", 1)
    await until(lambda: not store.ready)
    with pytest.raises(StoreUnavailable, match="is unavailable"):
        await store.commit(StoreChange(instances=(instance("a"),)))
    refused = store.ready
    await send_command(redis_server, "REPLICAOF", "NO", "ONE")
    await until(lambda: store.ready)
    await store.commit(StoreChange(instances=(instance("a"),)))
    assert not refused
    assert ["a"] == instances_of(store)


async def test_a_stopped_store_refuses_and_leaves_no_connection(make: MakeStore, redis_server: RedisServer) -> None:
    """Running commits are refused too."""
    store = make()
    await store.start()
    redis_server.signal(signal.SIGSTOP)
    try:
        pending_commit = asyncio.create_task(store.commit(StoreChange(instances=(instance("a"),))))
        await asyncio.sleep(0)
        await store.stop()
        with pytest.raises(StoreUnavailable):
            await pending_commit
    finally:
        redis_server.signal(signal.SIGCONT)
    with pytest.raises(StoreUnavailable, match="stopped"):
        await store.commit(StoreChange(instances=(instance("a"),)))
    async with Redis.from_url(redis_server.url, protocol=2) as admin, timeout(20):
        while len(await admin.client_list()) > 1:
            await asyncio.sleep(0.01)
    assert not store.ready


async def test_a_start_without_redis_reports_the_address(make: MakeStore, redis_server: RedisServer) -> None:
    """The error contains host and port, never the password; the store connects once Redis runs."""
    redis_server.kill()
    url = redis_server.url.replace("redis://", "redis://default:hush@")
    store = RedisStore(url, Clock(), max_finished_forks=1, timeout_s=TIMEOUT_S)
    where = rf"^the store at 127\.0\.0\.1:{redis_server.port} is unavailable: "
    try:
        with pytest.raises(StoreUnavailable, match=where) as error:
            await store.start()
        with pytest.raises(StoreUnavailable, match=where):
            await store.commit(StoreChange(instances=(instance("a"),)))
        refused = store.ready
        redis_server.start("--requirepass", "hush")
        await until(lambda: store.ready)
        await store.commit(StoreChange(instances=(instance("a"),)))
    finally:
        await store.stop()
    assert not refused
    assert ["a"] == instances_of(store)
    assert [] == [word for word in ("hush", "\n") if word in str(error.value)]
