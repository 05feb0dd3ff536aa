"""What the store makes of Redis' answers; a real one stands in tests/integration/test_redis_store.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from planner.store import redis
from planner.store.base import StoreChange, StoreUnavailable
from planner.store.messages import ChangeMessage, CommitResult, LogEntry, ReplicaBehind, StoreSnapshot
from planner.store.redis import RedisStore
from tests.unit.planner.builders import FakeTime
from tests.unit.planner.records import instance

MALFORMED_ENTRY = LogEntry(1, ChangeMessage(instances=(("x", {"colour": '"red"'}), ("y", {"report": "no report"}))))


class ScriptedRedis:
    """Answers commits with what it is told to, and holds nothing."""

    def __init__(self, *replies: CommitResult | ReplicaBehind) -> None:
        self.block_s = 1.0
        self.where = "nowhere"
        self.offered: list[int] = []
        self.loads = 0
        self._replies = list(replies)

    async def load(self) -> StoreSnapshot:
        """Nothing, at change 2 after the first time."""
        self.loads += 1
        number = 0 if self.loads == 1 else 2
        return StoreSnapshot("e", number, time=0.0, instances={}, forks={}, versions={}, floor=0, ended=())

    async def commit(self, epoch: str, since: int, at: float, bodies: Sequence[ChangeMessage]) -> CommitResult:
        """The next answer."""
        self.offered.append(len(bodies))
        reply = self._replies.pop(0)
        if isinstance(reply, ReplicaBehind):
            raise reply
        return reply

    async def follow(self, since: int) -> tuple[LogEntry, ...]:
        """Never a change."""
        await asyncio.Event().wait()
        return ()

    async def close(self) -> None:
        """There is nothing to let go of."""


async def outcome_of(scripted_redis: ScriptedRedis, time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> str:
    """What becomes of one commit, once the store has loaded everything again."""
    monkeypatch.setattr(redis, "_keyspace", lambda *_, **__: scripted_redis)
    store = RedisStore("redis://nowhere", time.clock, keep_forks=1, timeout_s=5.0)
    await store.start()
    try:
        await store.commit(StoreChange(instances=(instance("a"),)))
    except StoreUnavailable as error:
        result = str(error)
    else:
        result = "kept"
    async with asyncio.timeout(5):
        while scripted_redis.loads < 2:
            await asyncio.sleep(0)
    await store.stop()
    return result


async def test_what_redis_took_is_not_offered_twice(time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer brings a change that does not fit: the caller hears so, and what was taken stays taken."""
    scripted_redis = ScriptedRedis(CommitResult((MALFORMED_ENTRY,), (2,), time=0.0), CommitResult((), (3,), time=0.0))
    result = await outcome_of(scripted_redis, time, monkeypatch)
    assert ([1], True) == (scripted_redis.offered, "is loaded again: change 1 does not fit" in result)


async def test_what_redis_did_not_look_at_is_offered_again(time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another epoch: once everything is loaded, the same change is taken."""
    scripted_redis = ScriptedRedis(ReplicaBehind("another epoch"), CommitResult((), (3,), time=0.0))
    assert ("kept", [1, 1]) == (await outcome_of(scripted_redis, time, monkeypatch), scripted_redis.offered)
