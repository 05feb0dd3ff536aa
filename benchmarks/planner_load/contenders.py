"""Contenders of `benchmarks.planner_load`, and the rows that each of them makes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import harness
from benchmarks.harness import Contender
from benchmarks.planner_load.client import Call, Caller, CallSamples, drive, request
from benchmarks.planner_load.fleet import (
    CALL_TYPES,
    FORK_CALLS,
    HEARTBEAT,
    PLAN,
    CallerPool,
    LoadFleet,
    finish,
    fork_id,
    progress,
)
from benchmarks.planner_load.servers import ServerProcess
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
            # The target states no version: it is that of its earlier forks.
            known = self._store.state.instance(first.instance.instance_id) or record
            requested_at = time.perf_counter()
            group_plan.plan(self._store.state.group(known.group).view(demands), demands, self._store.now())
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


CONNECTIONS = 16
SLICES = 10
"""Slices of each contender with one call at a time, in a round."""
FORKS_A_SECOND = 5.0
HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of one rank: the planner's default."""
BARE, BARE_POST, BARE_MODELS = "bare", "POST", "POST, models"
DURATION_LABEL = "maximum rate"


@dataclass(frozen=True)
class LoadRun:
    """One round of one contender."""

    samples: CallSamples
    core_s: float = 0.0
    """CPU time of the server meanwhile."""


@dataclass(frozen=True)
class LoadRow:
    """One table row: a contender, the call type whose times are shown, and those whose rate is shown."""

    name: str
    contender: str
    call_type: str
    counted: tuple[str, ...] = ()


class LoadBench:
    """The contenders, their rows, and the measurements of each round."""

    def __init__(self, *, quick: bool) -> None:
        self.calls, self.seconds = 20, 1.0 if quick else 2.5
        self.sequential: dict[str, Contender] = {}
        """Contenders with one call at a time, in short slices, so that other load on the machine affects all
        alike.
        """
        self.concurrent: dict[str, Contender] = {}
        """Contenders with many concurrent calls."""
        self.rows: list[LoadRow] = []
        self.runs: dict[str, list[LoadRun]] = {}

    def measure(self, rounds: int) -> None:
        """Run all contenders; a round of the sequential ones is many slices."""
        harness.interleave(self.sequential, rounds * SLICES)
        harness.interleave(self.concurrent, rounds)

    def contender(self, name: str, measure: Callable[[], LoadRun], *rows: LoadRow) -> Contender:
        """Add a contender whose runs are recorded, and its rows; `measure` is one run."""

        def contender() -> float:
            run = measure()
            self.runs[name].append(run)
            return run.samples.wall_s

        self.runs[name] = []
        self.rows += rows
        return contender

    def serve_bare(self, server: ServerProcess) -> None:
        """Add the routes that do nothing."""
        fleet = LoadFleet(100)
        body = fleet.fork_request(fleet.targets[0], 1).model_dump_json()
        requests = {
            "GET": request("GET", "/bare"),
            BARE_POST: request("POST", "/bare", body),
            BARE_MODELS: request("POST", "/models", body),
        }

        def caller() -> Caller:
            for _ in range(self.calls):
                for call_type, each in requests.items():
                    yield Call(call_type, each)

        rows = [LoadRow(f"{BARE}: {call_type}", BARE, call_type) for call_type in requests]
        self.sequential[BARE] = self.contender(BARE, drive_callers(server, lambda: [caller()]), *rows)

    def one_at_a_time(self, server: ServerProcess, caller_pool: CallerPool) -> None:
        """Add each type of call without concurrent calls."""
        name = caller_pool.fleet.name
        rows = [LoadRow(f"{name}: {call_type}", name, call_type) for call_type in CALL_TYPES]
        self.sequential[name] = self.contender(
            name, drive_callers(server, lambda: [caller_pool.rounds(self.calls)]), *rows
        )

    def under_load(self, server: ServerProcess, caller_pool: CallerPool) -> None:
        """Add many concurrent calls, and forks while the fleet sends heartbeats."""
        name = caller_pool.fleet.name
        beats, forks = f"{name}, heartbeats", f"{name}, forks"
        self.concurrent[beats] = self.contender(
            beats,
            drive_callers(server, lambda: caller_pool.heartbeats(CONNECTIONS, 0.0, self.seconds)),
            LoadRow(f"{beats}: {DURATION_LABEL}", beats, HEARTBEAT, (HEARTBEAT,)),
        )
        self.concurrent[forks] = self.contender(
            forks,
            drive_callers(server, lambda: caller_pool.forks(CONNECTIONS, 0.0, self.seconds)),
            LoadRow(f"{forks}: {DURATION_LABEL}", forks, PLAN, FORK_CALLS),
        )
        for rate in (caller_pool.fleet.ranks / HEARTBEAT_S, caller_pool.fleet.ranks / HEARTBEAT_S / 2):
            self._paced(server, caller_pool, rate)

    def _paced(self, server: ServerProcess, caller_pool: CallerPool, rate: float) -> None:
        name = f"{caller_pool.fleet.name}, {rate:,.0f} heartbeats/s"

        def callers() -> list[Caller]:
            beats = caller_pool.heartbeats(CONNECTIONS, rate, self.seconds)
            return beats + caller_pool.forks(1, FORKS_A_SECOND, self.seconds)

        line = LoadRow(f"{name}: plan", name, PLAN, (HEARTBEAT,))
        self.concurrent[name] = self.contender(name, drive_callers(server, callers), line)

    def inside(self, fleet: LoadFleet) -> None:
        """Add the same plans computed in this process."""
        registry, name = InProcessPlanner(fleet), f"in process, {fleet.name}"
        rows = [LoadRow(f"{name}: {call_type}", name, call_type) for call_type in (REQUEST_PLAN, POLICY)]
        self.sequential[name] = self.contender(name, lambda: LoadRun(registry.rounds(self.calls)), *rows)


def drive_callers(server: ServerProcess, callers: Callable[[], Sequence[Caller]]) -> Callable[[], LoadRun]:
    """Run one round against a server; the callers are created for each round."""

    def measure() -> LoadRun:
        used = server.cpu_seconds
        samples = drive(server.port, callers())
        return LoadRun(samples, server.cpu_seconds - used)

    return measure


def median_seconds(runs: Sequence[LoadRun], call_type: str) -> float:
    """Return the median of the runs' medians, in seconds."""
    return median(medians(runs, call_type))


def medians(runs: Sequence[LoadRun], call_type: str) -> list[float]:
    """Return the median of each run, in seconds."""
    return [median(run.samples.seconds[call_type]) for run in runs]
