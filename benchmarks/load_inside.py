"""The planner without HTTP, for `benchmarks.planner_load`: a registry in this process, and the policy."""

from __future__ import annotations

import asyncio
import itertools
import time

from benchmarks.load_client import Samples
from benchmarks.load_fleet import Fleet, finish, fork_id, progress
from planner import policy
from planner.fleet import Demand
from planner.leases import Clock
from planner.metrics import Metrics
from planner.registry import Registry
from planner.store.memory import MemoryStore
from planner.store.records import InstanceRecord
from rfork import settings
from rfork.settings import PlannerSettings
from rfork.wire import ForkRequest, Plan

ASK, POLICY = "Registry.ask", "policy.plan"
FOR_EVER_S = 86_400.0


class Inside:
    """A registry that knows a fleet, every target with a fork under way."""

    def __init__(self, fleet: Fleet) -> None:
        options = settings.load(
            PlannerSettings, batch_s=0.0, forget_s=FOR_EVER_S, lease_ttl_s=FOR_EVER_S, log_level="error"
        )
        clock = Clock()
        self._fleet = fleet
        self._store = MemoryStore(clock, keep_forks=options.keep_forks)
        self._registry = Registry(options, self._store, clock, Metrics())
        self._lives = dict.fromkeys(fleet.targets, 0)
        self._plans: dict[int, Plan] = {}
        self._turn = itertools.cycle(fleet.targets)
        asyncio.run(self._register())

    def rounds(self, count: int) -> Samples:
        """`count` forks ended and asked for anew; each plan is made by the policy alone first."""
        return asyncio.run(self._rounds(count))

    async def _register(self) -> None:
        for seed in self._fleet.seeds():
            await self._registry.report(seed)
        for number in self._fleet.targets:
            first = self._fleet.ask(number, 0)
            await self._half_way(number, first, await self._registry.ask(first))

    async def _rounds(self, count: int) -> Samples:
        samples, began = Samples(), time.perf_counter()
        for number in itertools.islice(self._turn, count):
            await self._registry.finish(fork_id(number, self._lives[number]), finish(self._plans[number]))
            self._lives[number] += 1
            first = self._fleet.ask(number, self._lives[number])
            record = InstanceRecord(first.instance, seen_at=self._store.now(), forget_s=FOR_EVER_S)
            demands = [Demand(first.fork_id, record.source)]
            asked = time.perf_counter()
            policy.plan(self._store.state.group(record.group).view(demands), demands, self._store.now())
            planned = time.perf_counter()
            plan = await self._registry.ask(first)
            samples.seconds[ASK].append(time.perf_counter() - planned)
            samples.seconds[POLICY].append(planned - asked)
            await self._half_way(number, first, plan)
        samples.wall_s = time.perf_counter() - began
        return samples

    async def _half_way(self, number: int, first: ForkRequest, plan: Plan) -> None:
        await self._registry.progress(first.fork_id, progress(plan))
        self._plans[number] = await self._registry.ask(self._fleet.ask_again(first, plan))
