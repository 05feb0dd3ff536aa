"""Batches fork requests that arrive within a short window, so that they share one plan.

Batches of a group are chained: each reads from the ones before it, so a burst of arrivals must not become
many batches. While several requests keep arriving, the window grows with the time since the first. A single
fork should not wait: if there was no recent request and no other arrives after a moment, it is planned
immediately.

The requests of an announced scale-up (`planner.scaleups`) are known in advance: the first waits until all
have arrived, and then none waits any longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from planner.http_errors import ProblemError
from planner.request_intake import PlanContext
from planner.scaleups import ScaleUpRegistry
from planner.store.base import StoreUnavailable
from planner.store.records import GroupKey
from rfork.logs import logger
from rfork.schema import Plan

MAX_BATCH: Final = 2048
"""Maximum requests per batch, so that one call of the policy does not delay other work for long."""
MAX_WINDOW_S: Final = 1.0
"""Maximum window: a fork lasts seconds, and a waiting one makes no progress."""
WINDOW_GROWTH: Final = 0.5
"""Length of the next window, as a fraction of the time since the burst began."""
SOLO_WINDOW_S: Final = 0.002
"""Requests that were sent together all arrive within this time of the first."""

Plans = dict[str, Plan | Exception]
PlanBatch = Callable[[Sequence[PlanContext]], Awaitable[dict[str, Plan]]]


@dataclass(frozen=True)
class ScaleUpBatching:
    """Parameters and callbacks for batching the requests of a scale-up."""

    scaleups: ScaleUpRegistry
    max_wait_s: float
    """Maximum time that the first request of a batch waits; 0: requests are planned like any others."""
    register_arrival: Callable[[PlanContext], Awaitable[None]]
    """Publishes the arrival to every replica of the planner; raises StoreUnavailable."""
    on_batch_closed: Callable[[bool], None]
    """Called for each batch with whether all expected requests had arrived."""


def window_s(age_s: float, min_wait_s: float) -> float:
    """Return how long a batch waits for more requests, in a burst of age `age_s`."""
    return max(min_wait_s, min(WINDOW_GROWTH * age_s, MAX_WINDOW_S))


class RequestBatcher:
    """Batches initial requests by group. Replans, which have lost a source, do not wait."""

    def __init__(
        self,
        min_wait_s: float,
        plan: PlanBatch,
        monotonic: Callable[[], float] = time.monotonic,
        scaleup_batching: ScaleUpBatching | None = None,
    ) -> None:
        """`min_wait_s`: window of the first batch of a burst; 0: only announced scale-ups wait."""
        self._min_wait_s = min_wait_s
        self._plan = plan
        self._monotonic = monotonic
        self._open: dict[GroupKey, _Batch] = {}
        self._planning: set[_Batch] = set()
        """Batches that are being planned."""
        self._bursts: dict[GroupKey, _Burst] = {}
        self._scaleup_batching = scaleup_batching
        self._scaleup_batches: dict[GroupKey, _Batch] = {}
        if scaleup_batching is not None:
            scaleup_batching.scaleups.subscribe(self._release_complete)
        self._log = logger("planner.request_batcher")

    async def add(self, context: PlanContext) -> Plan:
        """Return the plan of one request, made together with those that arrive within its window."""
        if self._scaleup_batching is not None and self._is_expected(self._scaleup_batching, context):
            return await self._add_scaleup_member(self._scaleup_batching, context)
        if context.is_replan or self._min_wait_s <= 0:
            return _plan_for(context, await self._plan([context]))
        batch = self._open.get(context.group)
        if batch is None or len(batch.contexts) >= MAX_BATCH:
            batch = self._open[context.group] = _Batch()
            batch.task = asyncio.create_task(self._close(context.group, batch, self._window(context)))
        # If an instance sends requests under two ids, the later one counts.
        batch.contexts[context.target.report.instance_id] = context
        # Shielded: a caller that disconnects must not cancel the others' plan.
        return _plan_for(context, await asyncio.shield(batch.task))

    async def cancel(self, fork_id: str) -> None:
        """Remove a fork that ended while it waited, so that no other fork is chained to it.

        If it is being planned, return when that is done.
        """
        planning = next((batch for batch in self._planning if fork_id in batch.planning), None)
        if planning is not None:
            await asyncio.wait([planning.task])
            return
        for batch in (*self._open.values(), *self._scaleup_batches.values()):
            for instance_id, context in batch.contexts.items():
                if context.fork_id == fork_id:
                    del batch.contexts[instance_id]
                    return

    def _window(self, context: PlanContext) -> tuple[float, float]:
        """Return how long a batch opened by this request waits: while it has one request, and then for more."""
        now, group = self._monotonic(), context.group
        burst = self._bursts.get(group)
        first = burst is None or now > burst.expires_at
        if burst is None or first:
            self._bursts = {name: each for name, each in self._bursts.items() if now <= each.expires_at}
            burst = self._bursts[group] = _Burst(now)
        elif burst.single_since is not None:
            first = now - burst.single_since > self._min_wait_s
            burst.began_at, burst.single_since = now, None
        wait_s = window_s(now - burst.began_at, self._min_wait_s)
        burst.expires_at = now + wait_s + MAX_WINDOW_S
        # Requests that would read storage together gain more by sharing the read than they lose by waiting.
        solo_window_s = min(SOLO_WINDOW_S, wait_s) if first and not context.target.report.storage else wait_s
        return solo_window_s, wait_s - solo_window_s

    async def _close(self, group: GroupKey, batch: _Batch, waits_s: tuple[float, float]) -> Plans:
        solo_window_s, batch_wait_s = waits_s
        await asyncio.sleep(solo_window_s)
        if batch_wait_s and len(batch.contexts) > 1:
            await asyncio.sleep(batch_wait_s)
        if self._open.get(group) is batch:
            del self._open[group]
        contexts = list(batch.contexts.values())
        if len(contexts) == 1 and (burst := self._bursts.get(group)) is not None:
            burst.single_since = self._monotonic()
        return await self._plan_batch(batch, contexts)

    # -- scale-ups ----------------------------------------------------------------------------------

    def _is_expected(self, scaleup_batching: ScaleUpBatching, context: PlanContext) -> bool:
        """Return True if the request is expected by a scale-up, or repeats one that is waiting."""
        if context.is_replan or scaleup_batching.max_wait_s <= 0:
            return False
        waiting = self._scaleup_batches.get(context.group)
        if waiting is not None and context.target.report.instance_id in waiting.contexts:
            return True
        return context.is_scaleup_arrival and scaleup_batching.scaleups.is_expected(context.target)

    async def _add_scaleup_member(self, scaleup_batching: ScaleUpBatching, context: PlanContext) -> Plan:
        group, instance_id = context.group, context.target.report.instance_id
        batch = self._scaleup_batches.get(group)
        if batch is None or len(batch.contexts) >= MAX_BATCH:
            if batch is not None:
                batch.complete.set()
            batch = self._scaleup_batches[group] = _Batch()
            batch.task = asyncio.create_task(self._close_scaleup_batch(scaleup_batching, group, batch))
        # Added before its arrival is published: the last one must be part of the batch.
        batch.contexts[instance_id] = context
        try:
            await scaleup_batching.register_arrival(context)
        except StoreUnavailable:
            if batch.contexts.get(instance_id) is context:
                del batch.contexts[instance_id]
            raise
        finally:
            self._release_complete(group.model)
        if batch.contexts.get(instance_id) is context:
            batch.contexts[instance_id] = replace(context, known=True)
        return _plan_for(context, await asyncio.shield(batch.task))

    def _release_complete(self, model: str) -> None:
        """Release the batches of scale-ups that expect no more requests."""
        if self._scaleup_batching is None:
            return
        for group, batch in self._scaleup_batches.items():
            if group.model == model and not self._scaleup_batching.scaleups.expected(group):
                batch.complete.set()

    async def _close_scaleup_batch(self, scaleup_batching: ScaleUpBatching, group: GroupKey, batch: _Batch) -> Plans:
        scaleups, clock = scaleup_batching.scaleups, asyncio.get_running_loop().time
        began_at = clock()
        while not batch.complete.is_set():
            left_s = min(began_at + scaleup_batching.max_wait_s - clock(), scaleups.ttl_seconds(group.model))
            if left_s <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await batch.complete.wait()
            self._release_complete(group.model)  # expiry sends no notification
        if self._scaleup_batches.get(group) is batch:
            del self._scaleup_batches[group]
        contexts, missing = list(batch.contexts.values()), scaleups.expected(group)
        scaleup_batching.on_batch_closed(not missing)
        self._log.info(
            "scale-up batch closed", model=group.model, version=group.version, rank=group.rank_key,
            batch_size=len(contexts), missing=missing, waited_s=round(clock() - began_at, 3),
        )  # fmt: skip
        return await self._plan_batch(batch, contexts)

    # -- plans --------------------------------------------------------------------------------------

    async def _plan_batch(self, batch: _Batch, contexts: Sequence[PlanContext]) -> Plans:
        """Return the plans of a closed batch."""
        if not contexts:
            return {}
        batch.planning = frozenset(each.fork_id for each in contexts)
        self._planning.add(batch)
        try:
            return await self._plan_or_errors(contexts)
        finally:
            self._planning.discard(batch)

    async def _plan_or_errors(self, contexts: Sequence[PlanContext]) -> Plans:
        try:
            return dict(await self._plan(contexts))
        except (ProblemError, StoreUnavailable):
            raise
        except Exception:  # one request that cannot be planned must not fail the others
            self._log.exception("planning a batch failed, planning its requests separately", batch_size=len(contexts))
        plans: Plans = {}
        for each in contexts:
            try:
                plans.update(await self._plan([each]))
            except Exception as error:  # raised to its own caller
                plans[each.fork_id] = error
        return plans


def _plan_for(context: PlanContext, plans: Mapping[str, Plan | Exception]) -> Plan:
    """Return or raise the result of one request of a batch."""
    plan = plans.get(context.fork_id)
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        raise plan
    detail = f"fork {context.fork_id} ended, or its instance was removed or began another fork"
    raise ProblemError(409, "fork-conflict", detail)


class _Batch:
    def __init__(self) -> None:
        self.contexts: dict[str, PlanContext] = {}
        self.planning: frozenset[str] = frozenset()
        """Ids of the forks that are being planned."""
        self.task: asyncio.Task[Plans]
        self.complete = asyncio.Event()
        """Set when a scale-up's batch need not wait any longer."""


class _Burst:
    """Arrivals that follow one another closely.

    `single_since`: when the last batch was closed, if it had one request. Arrivals are then sequential, and
    none should wait long for others.
    """

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.expires_at = began_at
        self.single_since: float | None = None
