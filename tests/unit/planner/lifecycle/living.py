"""Fleets that live on, and a store that fails as often as it is told."""

from __future__ import annotations

from planner.registry import Registry
from planner.store.base import Change, Conflict, StoreUnavailable
from planner.store.memory import MemoryStore
from rfork.wire import ForkFinish, ForkProgress, Plan
from tests.unit.planner.builders import CHUNKS, FakeTime, ask, whole

ALL = ((0, CHUNKS),)
FORKED = ForkFinish(outcome="forked", seconds=1, bytes_read=CHUNKS << 20)


class WeakStore(MemoryStore):
    """A store that fails as often as it is told to, with the error it is told."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__(time.clock, keep_forks=10)
        self.failures = 0
        self.error: Exception = StoreUnavailable("redis is away")

    async def commit(self, change: Change) -> None:
        """Fail, or keep the change."""
        if self.failures and (change.group is not None or not isinstance(self.error, Conflict)):
            self.failures -= 1
            raise self.error
        await super().commit(change)


def chunks(count: int, rate: float = 1.0) -> ForkProgress:
    """Progress of the first so many chunks."""
    return ForkProgress(verified=((0, count),) if count else (), bytes_read=count << 20, bytes_per_s=rate)


def routes(plan: Plan) -> dict[str, tuple[tuple[int, int], ...]]:
    """Chunks by source."""
    return {route.source_id: route.chunks for route in plan.routes}


async def chain(registry: Registry, names: str, *, most: int = 4) -> None:
    """A seed and a chain of targets behind it."""
    await registry.report(whole("s", max_readers=most))
    for name in names:
        await registry.ask(ask(name, max_readers=most))
