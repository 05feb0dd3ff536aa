"""Queries of store replicas, and commands to their Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from redis.asyncio import Redis

from planner.core.records import StoreChange
from planner.store import redis
from planner.store.base import CommitConflict, StoreUnavailable
from planner.store.redis import RedisStore
from rfork.asyncio_timeout import timeout
from tests.processes import RedisServer
from tests.unit.planner.records import GROUP, fork

TIMEOUT_S = 10.0
"""Timeout of commits that should succeed: the machine may be busy."""
MakeStore = Callable[..., RedisStore]


def key(name: str) -> str:
    """Return the store's name for one of its keys, which depends on the record format."""
    return f"{{rfork}}:{redis.FORMAT}:{name}"


async def until(predicate: Callable[[], bool]) -> None:
    """Wait until a replica has found out by itself; raises TimeoutError otherwise."""
    async with timeout(20):
        while not predicate():
            await asyncio.sleep(0.01)


def instances_of(store: RedisStore) -> list[str]:
    """Return the ids of the instances in its state."""
    return sorted(record.report.instance_id for record in store.state.instances())


def forks_of(store: RedisStore) -> list[str]:
    """Return the sorted ids of the forks in its state."""
    return sorted(record.fork_id for record in store.state.forks())


async def send_command(server: RedisServer, *words: str | int) -> None:
    """Send Redis a command that no planner sends."""
    async with Redis.from_url(server.url, protocol=2) as admin:
        await admin.execute_command(*words)


async def plan(store: RedisStore, fork_id: str) -> int:
    """Commit a fork on the known version, retried while another replica is quicker; return that version."""
    while True:
        await until(lambda: store.ready)
        version = store.version(GROUP)
        with contextlib.suppress(CommitConflict, StoreUnavailable):
            await store.commit(StoreChange(forks=(fork(fork_id),), group=GROUP, version=version))
            return version
