"""Arrivals within a short window share one plan: the first that asks waits for the others.

Each batch stands behind the ones before it, so a rush of arrivals must not come to many batches: while
several keep coming the window grows with the time since the first. A fork that comes alone is to wait
for nobody: where nothing came just before, and nobody else has come after a moment, it is planned at once.

Those of a scale-up that was announced (`planner.scaleups`) are known beforehand: the first waits until all
are there, and then nobody waits any longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from planner.asking import Asked
from planner.problems import ProblemError
from planner.scaleups import ScaleUps
from planner.store.base import StoreUnavailable
from planner.store.records import GroupKey
from rfork.logs import logger
from rfork.wire import Plan

MOST: Final = 2048
"""Requests of one batch, so that one call of the policy does not hold up the others for long."""
LONGEST_S: Final = 1.0
"""The longest window: a fork lasts seconds, and one that waits does nothing."""
GROWTH: Final = 0.5
"""Of the time since a rush began, the part that its next window lasts."""
ALONE_S: Final = 0.002
"""Requests that were sent together all arrive within so long of the first."""

Plans = dict[str, Plan | Exception]
PlanThem = Callable[[Sequence[Asked]], Awaitable[dict[str, Plan]]]


@dataclass(frozen=True)
class Gathering:
    """How those of a scale-up are gathered."""

    scaleups: ScaleUps
    most_s: float
    """How long the first of a batch waits at most; 0: they are planned as any others."""
    arrive: Callable[[Asked], Awaitable[None]]
    """Has every replica of the planner know that this one came; raises StoreUnavailable."""
    ended: Callable[[bool], None]
    """Told of each batch whether nobody was missing at its end."""


def window_s(age_s: float, least_s: float) -> float:
    """How long a batch waits for others, the rush that it belongs to being `age_s` old."""
    return max(least_s, min(GROWTH * age_s, LONGEST_S))


class Batches:
    """Collects first requests by group. Requests that come again, and have lost a source, do not wait."""

    def __init__(
        self,
        least_s: float,
        plan: PlanThem,
        monotonic: Callable[[], float] = time.monotonic,
        gathering: Gathering | None = None,
    ) -> None:
        """`least_s` is the window of a batch that nothing came before; 0: nobody waits, unless announced."""
        self._least_s = least_s
        self._plan = plan
        self._monotonic = monotonic
        self._open: dict[GroupKey, _Batch] = {}
        self._closed: set[_Batch] = set()
        """Of which the plans are being made."""
        self._rushes: dict[GroupKey, _Rush] = {}
        self._gathering = gathering
        self._gathered: dict[GroupKey, _Batch] = {}
        if gathering is not None:
            gathering.scaleups.subscribe(self._look)
        self._log = logger("planner.batches")

    async def add(self, asked: Asked) -> Plan:
        """The plan of one request, made together with those of others that came within the window."""
        if self._gathering is not None and self._waits_for_others(self._gathering, asked):
            return await self._gather(self._gathering, asked)
        if asked.urgent or self._least_s <= 0:
            return _own(asked, await self._plan([asked]))
        batch = self._open.get(asked.group)
        if batch is None or len(batch.asked) >= MOST:
            batch = self._open[asked.group] = _Batch()
            batch.task = asyncio.create_task(self._close(asked.group, batch, self._waits_s(asked)))
        # An instance that asks under two ids means the later one.
        batch.asked[asked.target.report.instance_id] = asked
        # Shielded: a caller that hangs up must not end the others' plan.
        return _own(asked, await asyncio.shield(batch.task))

    async def leave(self, fork_id: str) -> None:
        """Plan nothing for a fork that ended while it waited: others would stand behind it in vain.

        If it is being planned at this moment, come back when it is.
        """
        closed = next((batch for batch in self._closed if fork_id in batch.closed), None)
        if closed is not None:
            await asyncio.wait([closed.task])
            return
        for batch in (*self._open.values(), *self._gathered.values()):
            for instance_id, asked in batch.asked.items():
                if asked.fork_id == fork_id:
                    del batch.asked[instance_id]
                    return

    def _waits_s(self, asked: Asked) -> tuple[float, float]:
        """How long the batch that this request opens waits: if it stays alone, and then for others."""
        now, group = self._monotonic(), asked.group
        rush = self._rushes.get(group)
        first = rush is None or now > rush.over_at
        if rush is None or first:
            self._rushes = {name: each for name, each in self._rushes.items() if now <= each.over_at}
            rush = self._rushes[group] = _Rush(now)
        elif rush.alone_at is not None:
            first = now - rush.alone_at > self._least_s
            rush.began_at, rush.alone_at = now, None
        wait_s = window_s(now - rush.began_at, self._least_s)
        rush.over_at = now + wait_s + LONGEST_S
        # Those that would read storage together gain more by sharing it than they lose by waiting.
        alone_s = min(ALONE_S, wait_s) if first and not asked.target.report.storage else wait_s
        return alone_s, wait_s - alone_s

    async def _close(self, group: GroupKey, batch: _Batch, waits_s: tuple[float, float]) -> Plans:
        alone_s, others_s = waits_s
        await asyncio.sleep(alone_s)
        if others_s and len(batch.asked) > 1:
            await asyncio.sleep(others_s)
        if self._open.get(group) is batch:
            del self._open[group]
        asked = list(batch.asked.values())
        if len(asked) == 1 and (rush := self._rushes.get(group)) is not None:
            rush.alone_at = self._monotonic()
        return await self._plans(batch, asked)

    # -- those of a scale-up ------------------------------------------------------------------------

    def _waits_for_others(self, gathering: Gathering, asked: Asked) -> bool:
        """Whether it is one of those expected, or is waiting already and was sent again."""
        if asked.urgent or gathering.most_s <= 0:
            return False
        waiting = self._gathered.get(asked.group)
        if waiting is not None and asked.target.report.instance_id in waiting.asked:
            return True
        return asked.arrives and gathering.scaleups.awaits(asked.target)

    async def _gather(self, gathering: Gathering, asked: Asked) -> Plan:
        group, own = asked.group, asked.target.report.instance_id
        batch = self._gathered.get(group)
        if batch is None or len(batch.asked) >= MOST:
            if batch is not None:
                batch.whole.set()
            batch = self._gathered[group] = _Batch()
            batch.task = asyncio.create_task(self._close_gathered(gathering, group, batch))
        # It is there before anybody is told that it came: the last one must not be left behind.
        batch.asked[own] = asked
        try:
            await gathering.arrive(asked)
        except StoreUnavailable:
            if batch.asked.get(own) is asked:
                del batch.asked[own]
            raise
        finally:
            self._look(group.model)
        if batch.asked.get(own) is asked:
            batch.asked[own] = replace(asked, known=True)
        return _own(asked, await asyncio.shield(batch.task))

    def _look(self, model: str) -> None:
        """Let those go that wait for nobody any more."""
        if self._gathering is None:
            return
        for group, batch in self._gathered.items():
            if group.model == model and not self._gathering.scaleups.expected(group):
                batch.whole.set()

    async def _close_gathered(self, gathering: Gathering, group: GroupKey, batch: _Batch) -> Plans:
        scaleups, clock = gathering.scaleups, asyncio.get_running_loop().time
        began_at = clock()
        while not batch.whole.is_set():
            left_s = min(began_at + gathering.most_s - clock(), scaleups.lasts_s(group.model))
            if left_s <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await batch.whole.wait()
            self._look(group.model)  # expiry sends no notification
        if self._gathered.get(group) is batch:
            del self._gathered[group]
        asked, missing = list(batch.asked.values()), scaleups.expected(group)
        gathering.ended(not missing)
        self._log.info(
            "scale-up gathered", model=group.model, version=group.version, rank=group.rank_key,
            together=len(asked), missing=missing, waited_s=round(clock() - began_at, 3),
        )  # fmt: skip
        return await self._plans(batch, asked)

    # -- plans --------------------------------------------------------------------------------------

    async def _plans(self, batch: _Batch, asked: Sequence[Asked]) -> Plans:
        """The plans of a batch that is closed."""
        if not asked:
            return {}
        batch.closed = frozenset(each.fork_id for each in asked)
        self._closed.add(batch)
        try:
            return await self._planned(asked)
        finally:
            self._closed.discard(batch)

    async def _planned(self, asked: Sequence[Asked]) -> Plans:
        try:
            return dict(await self._plan(asked))
        except (ProblemError, StoreUnavailable):
            raise
        except Exception:  # one request that cannot be planned must not take the others with it
            self._log.exception("batch failed: its requests are planned one by one", together=len(asked))
        plans: Plans = {}
        for each in asked:
            try:
                plans.update(await self._plan([each]))
            except Exception as error:  # handed to its own caller
                plans[each.fork_id] = error
        return plans


def _own(asked: Asked, plans: Mapping[str, Plan | Exception]) -> Plan:
    """The plan of one request of a batch."""
    plan = plans.get(asked.fork_id)
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        raise plan
    why = f"fork {asked.fork_id} ended, or its instance was removed or began another one"
    raise ProblemError(409, "fork-conflict", why)


class _Batch:
    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}
        self.closed: frozenset[str] = frozenset()
        """Ids of the forks whose plans are being made."""
        self.task: asyncio.Task[Plans]
        self.whole = asyncio.Event()
        """Of a scale-up's: nobody is waited for any more."""


class _Rush:
    """Arrivals that follow one another closely.

    `alone_at`: when the last batch was closed, if it was of one. They come one after another then, and
    nobody is to wait long for nobody.
    """

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.over_at = began_at
        self.alone_at: float | None = None
