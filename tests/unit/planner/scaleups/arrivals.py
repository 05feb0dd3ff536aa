"""Instances that come one by one, and a store that counts the plans that are made for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from planner.store.base import StoreChange, StoreUnavailable
from planner.store.memory import MemoryStore
from rfork.schema import ForkRequest, Plan, Rank, ScaleUp, SourceFault
from tests.unit.planner.builders import FakeTime, fork_request

SINGLE_RANK = Rank()
RANKS = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))


class CountingStore(MemoryStore):
    """Counts how many forks each plan was for, and is away when told."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__(time.clock, keep_forks=100)
        self.plans: list[int] = []
        self.unavailable = False

    async def commit(self, change: StoreChange) -> None:
        """Count the change where it is a plan, and keep it."""
        if self.unavailable:
            raise StoreUnavailable("redis is away")
        if change.group is not None:
            self.plans.append(len(change.forks))
        await super().commit(change)


def scaleup(replicas: int, name: str = "up", **changes: object) -> ScaleUp:
    """Replicas of the model `m`."""
    return ScaleUp.model_validate({"scaleup_id": name, "model": "m", "replicas": replicas} | changes)


def start_requests(*requests: Coroutine[Any, Any, Plan]) -> list[asyncio.Task[Plan]]:
    """Ask, and go on."""
    return [asyncio.create_task(each) for each in requests]


async def run_until_idle() -> None:
    """Until everybody waits who is going to."""
    for _ in range(20):
        await asyncio.sleep(0)


def count_waiting(tasks: list[asyncio.Task[Plan]]) -> int:
    """How many have no plan yet."""
    return sum(not task.done() for task in tasks)


def rank_request(
    replica: str, rank: Rank = SINGLE_RANK, start_id: str = "0", faults: tuple[SourceFault, ...] = ()
) -> ForkRequest:
    """The request of one rank of a replica, by the id that engines give it."""
    return fork_request(f"{replica}-{rank.key}-dp{rank.dp}-{start_id}", rank=rank, faults=faults)
