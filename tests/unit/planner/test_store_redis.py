"""What the store makes of Redis' answers; a real one stands in tests/integration/test_redis_store.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from planner.store import redis
from planner.store.base import Change, StoreUnavailable
from planner.store.exchange import Behind, Body, Contents, Entry, Outcome
from planner.store.redis import RedisStore
from tests.unit.planner.builders import FakeTime
from tests.unit.planner.records import instance

STRANGE = Entry(1, Body(instances=(("x", {"colour": '"red"'}), ("y", {"report": "no report"}))))


class ScriptedRedis:
    """Answers commits with what it is told to, and holds nothing."""

    def __init__(self, *answers: Outcome | Behind) -> None:
        self.block_s = 1.0
        self.where = "nowhere"
        self.offered: list[int] = []
        self.loads = 0
        self._answers = list(answers)

    async def load(self) -> Contents:
        """Nothing, at change 2 after the first time."""
        self.loads += 1
        number = 0 if self.loads == 1 else 2
        return Contents("e", number, at=0.0, instances={}, forks={}, versions={}, floor=0, ended=())

    async def commit(self, epoch: str, since: int, at: float, bodies: Sequence[Body]) -> Outcome:
        """The next answer."""
        self.offered.append(len(bodies))
        answer = self._answers.pop(0)
        if isinstance(answer, Behind):
            raise answer
        return answer

    async def follow(self, since: int) -> tuple[Entry, ...]:
        """Never a change."""
        await asyncio.Event().wait()
        return ()

    async def close(self) -> None:
        """There is nothing to let go of."""


async def outcome_of(answers: ScriptedRedis, time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> str:
    """What becomes of one commit, once the store has loaded everything again."""
    monkeypatch.setattr(redis, "_keyspace", lambda *_, **__: answers)
    store = RedisStore("redis://nowhere", time.clock, keep_forks=1, timeout_s=5.0)
    await store.start()
    try:
        await store.commit(Change(instances=(instance("a"),)))
    except StoreUnavailable as error:
        told = str(error)
    else:
        told = "kept"
    async with asyncio.timeout(5):
        while answers.loads < 2:
            await asyncio.sleep(0)
    await store.stop()
    return told


async def test_what_redis_took_is_not_offered_twice(time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer brings a change that does not fit: the caller hears so, and what was taken stays taken."""
    answers = ScriptedRedis(Outcome((STRANGE,), (2,), at=0.0), Outcome((), (3,), at=0.0))
    told = await outcome_of(answers, time, monkeypatch)
    assert ([1], True) == (answers.offered, "is loaded again: change 1 does not fit" in told)


async def test_what_redis_did_not_look_at_is_offered_again(
    time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another epoch: once everything is loaded, the same change is taken."""
    answers = ScriptedRedis(Behind("another epoch"), Outcome((), (3,), at=0.0))
    assert ("kept", [1, 1]) == (await outcome_of(answers, time, monkeypatch), answers.offered)
