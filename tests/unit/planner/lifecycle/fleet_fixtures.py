"""Fleets for lifecycle tests, and a store that fails on request."""

from __future__ import annotations

from planner.core.records import StoreChange
from planner.plan_service import PlanService
from planner.store.base import CommitConflict, StoreUnavailable
from planner.store.memory import MemoryStore
from rfork.schema import ForkProgress, ForkResult, Plan
from tests.unit.planner.builders import CHUNKS, FakeTime, fork_request, seed_report

ALL = ((0, CHUNKS),)
FORKED = ForkResult(outcome="forked", seconds=1, bytes_read=CHUNKS << 20)


class FailingStore(MemoryStore):
    """A store that fails a number of times, with a chosen error."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__(time.clock, max_finished_forks=10)
        self.failures = 0
        self.error: Exception = StoreUnavailable("redis is unavailable")

    async def commit(self, change: StoreChange) -> None:
        """Fail, or apply the change."""
        if self.failures and (change.group is not None or not isinstance(self.error, CommitConflict)):
            self.failures -= 1
            raise self.error
        await super().commit(change)


def chunk_progress(count: int, rate: float = 1.0) -> ForkProgress:
    """Return progress of the first `count` chunks."""
    return ForkProgress(verified=((0, count),) if count else (), bytes_read=count << 20, bytes_per_s=rate)


def routes_by_source(plan: Plan) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the chunks by source."""
    return {route.source_id: route.chunks for route in plan.routes}


async def start_chain(service: PlanService, names: str, *, max_readers: int = 4) -> None:
    """Start a seed and a chain of targets that read from it."""
    await service.report(seed_report("s", max_readers=max_readers))
    for name in names:
        await service.plan(fork_request(name, max_readers=max_readers))
