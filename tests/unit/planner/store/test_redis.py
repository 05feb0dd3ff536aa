"""RedisStore with scripted responses; tests/integration/redis_store uses a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from planner.core.records import StoreChange
from planner.store import redis
from planner.store.base import StoreUnavailable
from planner.store.messages import ChangeMessage, CommitResult, LogEntry, ReplicaOutdated, StoreSnapshot
from planner.store.redis import RedisStore
from rfork.asyncio_timeout import timeout
from tests.unit.planner.builders import FakeTime
from tests.unit.planner.records import instance

MALFORMED_ENTRY = LogEntry(1, ChangeMessage(instances=(("x", {"colour": '"red"'}), ("y", {"report": "no report"}))))


class ScriptedRedis:
    """Stands in for `RedisClient`: responds to commits with scripted replies, and stores nothing."""

    def __init__(self, *replies: CommitResult | ReplicaOutdated) -> None:
        self.block_s = 1.0
        self.address = "nowhere"
        self.sent_counts: list[int] = []
        """Number of changes in each commit."""
        self.loads = 0
        self._replies = list(replies)

    async def load(self) -> StoreSnapshot:
        """Return an empty store, at change 2 after the first call."""
        self.loads += 1
        number = 0 if self.loads == 1 else 2
        return StoreSnapshot("e", number, time=0.0, instances={}, forks={}, versions={}, floor=0, ended=())

    async def commit(self, epoch: str, since: int, at: float, bodies: Sequence[ChangeMessage]) -> CommitResult:
        """Return the next reply."""
        self.sent_counts.append(len(bodies))
        reply = self._replies.pop(0)
        if isinstance(reply, ReplicaOutdated):
            raise reply
        return reply

    async def read_changes(self, since: int) -> tuple[LogEntry, ...]:
        """Wait for ever: there are no changes."""
        await asyncio.Event().wait()
        return ()

    async def close(self) -> None:
        """Close nothing."""


async def outcome_of(scripted_redis: ScriptedRedis, time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the outcome of one commit, once the store has reloaded."""
    monkeypatch.setattr(redis, "RedisClient", lambda *_, **__: scripted_redis)
    store = RedisStore("redis://nowhere", time.clock, max_finished_forks=1, timeout_s=5.0)
    await store.start()
    try:
        await store.commit(StoreChange(instances=(instance("a"),)))
    except StoreUnavailable as error:
        result = str(error)
    else:
        result = "kept"
    async with timeout(5):
        while scripted_redis.loads < 2:
            await asyncio.sleep(0)
    await store.stop()
    return result


async def test_a_commit_that_redis_applied_is_not_repeated(time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its response contains a malformed change: the caller gets an error, and the commit stays applied."""
    scripted_redis = ScriptedRedis(CommitResult((MALFORMED_ENTRY,), (2,), time=0.0), CommitResult((), (3,), time=0.0))
    result = await outcome_of(scripted_redis, time, monkeypatch)
    assert [1] == scripted_redis.sent_counts
    assert "change 1 does not match" in result


async def test_a_commit_that_redis_rejected_as_outdated_is_repeated(
    time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch changed: after reloading, the same commit is applied."""
    scripted_redis = ScriptedRedis(ReplicaOutdated("another epoch"), CommitResult((), (3,), time=0.0))
    assert "kept" == await outcome_of(scripted_redis, time, monkeypatch)
    assert [1, 1] == scripted_redis.sent_counts
