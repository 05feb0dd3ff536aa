"""Fixture: replicas of one store on a separate Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from planner.clock import Clock
from planner.store.redis import RedisStore
from tests.integration.redis_store.stores import (
    TIMEOUT_S,
    MakeStore,
)
from tests.processes import RedisServer


@pytest.fixture
async def make(redis_server: RedisServer) -> AsyncIterator[MakeStore]:
    """Creates replicas of one store and stops them after the test."""
    made: list[RedisStore] = []

    def make(*, max_finished_forks: int = 10, clock: Clock | None = None, timeout_s: float = TIMEOUT_S) -> RedisStore:
        made.append(
            RedisStore(redis_server.url, clock or Clock(), max_finished_forks=max_finished_forks, timeout_s=timeout_s)
        )
        return made[-1]

    yield make
    for store in made:
        await store.stop()
