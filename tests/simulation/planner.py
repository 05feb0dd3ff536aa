"""The planner of a simulated fleet: production's service and policy, one or two replicas of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from planner.clock import Clock
from planner.core.problems import ProblemError
from planner.core.records import GroupKey, StoreChange
from planner.core.state import PlannerState
from planner.metrics import Metrics
from planner.ownership import Claimant
from planner.plan_service import PlanService
from planner.store.base import CommitConflict, PlannerStore
from planner.store.memory import MemoryStore
from rfork.errors import PlannerRejected, PlannerUnreachable
from rfork.settings import PlannerSettings

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")
PLANNER_TIMEOUT_S = 5.0
MAX_FINISHED_FORKS = 100


@cache
def metrics() -> Metrics:
    """Return the metrics that all worlds share: building them costs more than a world."""
    return Metrics()


class SharedRecords:
    """The store that two replicas share: decides which changes are applied, in one order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, latency_s: Callable[[], float]) -> None:
        self.loop = loop
        self.latency_s = latency_s
        self.versions: dict[GroupKey, int] = {}
        self.changes = 0
        self.replicas: list[SharedStore] = []
        self.log: list[StoreChange] = []


class SharedStore:
    """One replica's view of the shared records; see `planner.store.base.PlannerStore`."""

    def __init__(self, records: SharedRecords) -> None:
        self.state = PlannerState(max_finished_forks=MAX_FINISHED_FORKS)
        self._records = records
        self._known: dict[GroupKey, int] = {}
        for change in records.log:
            self._apply(change)
        self._known.update(records.versions)
        self.state.notify_reloaded()
        records.replicas.append(self)

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        self._records.replicas.remove(self)

    async def commit(self, change: StoreChange) -> None:
        records = self._records
        await asyncio.sleep(records.latency_s())
        if change.group is not None:
            if change.version != records.versions.get(change.group, 0):
                await asyncio.sleep(records.latency_s())  # the newer change has arrived here by then
                self._known[change.group] = records.versions.get(change.group, 0)
                raise CommitConflict
            records.changes += 1
            records.versions[change.group] = records.changes
        records.log.append(change)
        number = records.changes
        for replica in records.replicas:
            replica._apply(change)
            if change.group is not None:
                replica._known[change.group] = number

    def _apply(self, change: StoreChange) -> None:
        self.state.apply(
            StoreChange(
                instances=change.instances,
                forks=change.forks,
                removed=change.removed,
                scaleups=change.scaleups,
                withdrawn=change.withdrawn,
            )
        )

    def version(self, group: GroupKey) -> int:
        return self._known.get(group, 0)

    def now(self) -> float:
        return self._records.loop.time()

    @property
    def ready(self) -> bool:
        return True


class SimulatedPlanner:
    """The planner's service: requests reach a running replica, or none."""

    def __init__(self, world: World, replicas: int, settings: PlannerSettings) -> None:
        self._world = world
        self._settings = settings
        self._clock = Clock(world.loop.time, world.loop.unix_s)
        self._records = SharedRecords(world.loop, world.latency_s) if replicas > 1 else None
        self.replicas: list[PlanService | None] = [self._start() for _ in range(replicas)]
        self.silent = False
        """True if requests are accepted and not answered."""
        self._epoch = 0

    def _start(self) -> PlanService:
        store: PlannerStore
        if self._records is not None:
            store = SharedStore(self._records)
        else:
            store = MemoryStore(self._clock, max_finished_forks=MAX_FINISHED_FORKS)
        return PlanService(self._settings, store, self._clock, metrics())

    def kill(self, number: int) -> None:
        """Stop one replica at once; without a shared store its records are lost."""
        service, self.replicas[number] = self.replicas[number], None
        self._epoch += 1
        if service is not None and self._records is not None:
            self._records.replicas.remove(service.store)  # type: ignore[arg-type]

    def restart(self, number: int) -> None:
        """Start a stopped replica again."""
        if self.replicas[number] is None:
            self.replicas[number] = self._start()

    def running(self) -> list[PlanService]:
        """Return the running replicas."""
        return [service for service in self.replicas if service is not None]

    async def call(self, name: str, address: str, call: Callable[[PlanService, Claimant], Awaitable[T]]) -> T:
        """Make one request from the instance `name`. Raises PlannerUnreachable or PlannerRejected."""
        world = self._world
        await asyncio.sleep(world.latency_s())
        running = self.running()
        if self.silent or world.is_cut_off(name):
            await asyncio.sleep(PLANNER_TIMEOUT_S)
            raise PlannerUnreachable("the planner did not respond", silent=True)
        if not running:
            raise PlannerUnreachable("connection refused")
        service, epoch = world.random.choice(running), self._epoch
        try:
            result = await call(service, Claimant(address=address))
        except ProblemError as error:
            raise PlannerRejected(error.detail, status=error.status, problem=error.slug) from None
        await asyncio.sleep(world.latency_s())
        if service not in self.replicas and epoch != self._epoch:
            raise PlannerUnreachable("connection reset")
        return result
