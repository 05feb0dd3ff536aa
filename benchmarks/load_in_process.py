"""The planner without HTTP, for `benchmarks.planner_load`: a plan service in this process, and the policy."""

from __future__ import annotations

import asyncio
import itertools
import time

from benchmarks.load_client import CallSamples
from benchmarks.load_fleet import LoadFleet, finish, fork_id, progress
from planner.clock import Clock
from planner.core.records import InstanceRecord
from planner.core.state import MAX_FINISHED_FORKS
from planner.metrics import Metrics
from planner.plan_service import PlanService
from planner.policy import group_plan
from planner.policy.types import ForkDemand
from planner.store.memory import MemoryStore
from rfork import settings
from rfork.schema import ForkRequest, Plan
from rfork.settings import PlannerSettings

REQUEST_PLAN, POLICY = "PlanService.plan", "policy.plan"
FOR_EVER_S, MAX_LEASE_TTL_S = 86_400.0, 3_600.0


class InProcessPlanner:
    """PlanService that knows a fleet; every target has a running fork."""

    def __init__(self, fleet: LoadFleet) -> None:
        options = settings.load(
            PlannerSettings,
            batch_window_s=0.0,
            instance_ttl_s=FOR_EVER_S,
            lease_ttl_s=MAX_LEASE_TTL_S,
        )
        clock = Clock()
        self._fleet = fleet
        self._store = MemoryStore(clock, max_finished_forks=MAX_FINISHED_FORKS)
        self._service = PlanService(options, self._store, clock, Metrics())
        self._fork_numbers = dict.fromkeys(fleet.targets, 0)
        self._plans: dict[int, Plan] = {}
        self._turn = itertools.cycle(fleet.targets)
        asyncio.run(self._register())

    def rounds(self, count: int) -> CallSamples:
        """End and restart `count` forks; each plan is first made by the policy alone."""
        return asyncio.run(self._rounds(count))

    async def _register(self) -> None:
        for seed in self._fleet.seeds():
            await self._service.report(seed)
        for number in self._fleet.targets:
            first = self._fleet.fork_request(number, 0)
            await self._report_half(number, first, await self._service.plan(first))

    async def _rounds(self, count: int) -> CallSamples:
        samples, began = CallSamples(), time.perf_counter()
        for number in itertools.islice(self._turn, count):
            await self._service.finish(fork_id(number, self._fork_numbers[number]), finish(self._plans[number]))
            self._fork_numbers[number] += 1
            first = self._fleet.fork_request(number, self._fork_numbers[number])
            record = InstanceRecord(first.instance, seen_at=self._store.now(), ttl_s=FOR_EVER_S)
            demands = [ForkDemand(first.fork_id, record.source)]
            requested_at = time.perf_counter()
            group_plan.plan(self._store.state.group(record.group).view(demands), demands, self._store.now())
            planned = time.perf_counter()
            plan = await self._service.plan(first)
            samples.seconds[REQUEST_PLAN].append(time.perf_counter() - planned)
            samples.seconds[POLICY].append(planned - requested_at)
            await self._report_half(number, first, plan)
        samples.wall_s = time.perf_counter() - began
        return samples

    async def _report_half(self, number: int, first: ForkRequest, plan: Plan) -> None:
        await self._service.progress(first.fork_id, progress(plan))
        self._plans[number] = await self._service.plan(self._fleet.replan_request(first, plan))
