"""Instances that arrive one by one, and a store that counts plans."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from planner.core.records import StoreChange
from planner.store.base import StoreUnavailable
from planner.store.memory import MemoryStore
from rfork.schema import ForkRequest, Plan, Rank, ScaleUp, SourceFault
from tests.unit.planner.builders import FakeTime, fork_request

SINGLE_RANK = Rank()
RANKS = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))


class CountingStore(MemoryStore):
    """Counts the forks of each plan, and fails when requested."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__(time.clock, max_finished_forks=100)
        self.plans: list[int] = []
        self.unavailable = False

    async def commit(self, change: StoreChange) -> None:
        """Count the change if it is a plan, and apply it."""
        if self.unavailable:
            raise StoreUnavailable("redis is unavailable")
        if change.group is not None:
            self.plans.append(len(change.forks))
        await super().commit(change)


def scaleup(replicas: int, name: str = "up", **changes: object) -> ScaleUp:
    """Return a scale-up of model `m`."""
    return ScaleUp.model_validate({"scaleup_id": name, "model": "m", "replicas": replicas} | changes)


def start_requests(*requests: Coroutine[Any, Any, Plan]) -> list[asyncio.Task[Plan]]:
    """Start these requests as tasks."""
    return [asyncio.create_task(each) for each in requests]


async def run_until_idle() -> None:
    """Run the event loop until all tasks wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def count_waiting(tasks: list[asyncio.Task[Plan]]) -> int:
    """Return the number of requests without a plan."""
    return sum(not task.done() for task in tasks)


def rank_request(
    replica: str, rank: Rank = SINGLE_RANK, start_id: str = "0", faults: tuple[SourceFault, ...] = ()
) -> ForkRequest:
    """Return the request of one rank of a replica, with an id as engines choose it."""
    return fork_request(f"{replica}-{rank.key}-dp{rank.dp}-{start_id}", rank=rank, faults=faults)
