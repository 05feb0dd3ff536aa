"""Arrivals within a short window share one plan: the first that asks waits for the others.

Each batch stands behind the ones before it, so a rush of arrivals must not come to many batches: while
they keep coming the window grows with the time since the first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from planner.planning import Asked
from planner.problems import ProblemError
from planner.store.records import GroupKey
from rfork.wire import Plan

MOST: Final = 2048
"""Requests of one batch, so that one call of the policy does not hold up the others for long."""
LONGEST_S: Final = 1.0
"""The longest window: a fork lasts seconds, and one that waits does nothing."""
GROWTH: Final = 0.5
"""Of the time since a rush began, the part that its next window lasts."""

PlanThem = Callable[[Sequence[Asked]], Awaitable[dict[str, Plan]]]


def window_s(age_s: float, least_s: float) -> float:
    """How long a batch waits for others, the rush that it belongs to being `age_s` old."""
    return max(least_s, min(GROWTH * age_s, LONGEST_S))


class Batches:
    """Collects first requests by group. Requests that come again, and have lost a source, do not wait."""

    def __init__(
        self, least_s: float, plan: PlanThem, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`least_s` is the window of a batch that nothing came before; 0: nobody waits."""
        self._least_s = least_s
        self._plan = plan
        self._monotonic = monotonic
        self._open: dict[GroupKey, _Batch] = {}
        self._rushes: dict[GroupKey, _Rush] = {}

    async def add(self, asked: Asked) -> Plan:
        """The plan of one request, made together with those of others that came within the window."""
        if asked.urgent or self._least_s <= 0:
            return (await self._plan([asked]))[asked.fork_id]
        batch = self._open.get(asked.group)
        if batch is None or len(batch.asked) >= MOST:
            batch = self._open[asked.group] = _Batch()
            batch.task = asyncio.create_task(self._close(asked.group, batch, self._window_s(asked.group)))
        # An instance that asks under two ids means the later one.
        batch.asked[asked.target.report.instance_id] = asked
        # Shielded: a caller that hangs up must not end the others' plan.
        plans = await asyncio.shield(batch.task)
        if asked.fork_id not in plans:
            raise ProblemError(
                409, "fork-conflict", f"the instance of fork {asked.fork_id} began another one"
            )
        return plans[asked.fork_id]

    def _window_s(self, group: GroupKey) -> float:
        now = self._monotonic()
        rush = self._rushes.get(group)
        if rush is None or now > rush.over_at:
            self._rushes = {name: each for name, each in self._rushes.items() if now <= each.over_at}
            rush = self._rushes[group] = _Rush(now)
        wait_s = window_s(now - rush.began_at, self._least_s)
        rush.over_at = now + wait_s + LONGEST_S
        return wait_s

    async def _close(self, group: GroupKey, batch: _Batch, after_s: float) -> dict[str, Plan]:
        await asyncio.sleep(after_s)
        if self._open.get(group) is batch:
            del self._open[group]
        return await self._plan(list(batch.asked.values()))


class _Batch:
    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}
        self.task: asyncio.Task[dict[str, Plan]]


class _Rush:
    """Arrivals that follow one another closely."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.over_at = began_at
