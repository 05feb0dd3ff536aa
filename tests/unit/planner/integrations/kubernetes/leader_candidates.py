"""Candidates for one Lease, on an event loop with virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from planner.integrations.kubernetes.api_server import ClusterUnavailable, ResourceConflict
from planner.integrations.kubernetes.cluster import Cluster, ObservedLease
from planner.integrations.kubernetes.leader_election import LeaderElection

LEASE_S = 15.0
NO_LEASE = ObservedLease(None, "", 0.0, "")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time: instead of waiting, its clock jumps."""

    def __init__(self) -> None:
        super().__init__(_TimeJumpingSelector(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _TimeJumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all tasks wait forever")
        self._loop.now += timeout
        return super().select(0)


@dataclass
class LeaseServer:
    """An API server with one Lease."""

    lease: ObservedLease = NO_LEASE
    writes: int = 0
    unreachable: set[str] = field(default_factory=set)
    """Candidates that cannot reach it."""
    unresponsive: set[str] = field(default_factory=set)
    """Candidates whose calls are executed but never get a response."""

    def view_for(self, name: str) -> LeaseServerView:
        return LeaseServerView(self, name)


@dataclass
class LeaseServerView(Cluster):
    """The API server as seen by one candidate."""

    lease_server: LeaseServer
    candidate: str

    async def read_lease(self, name: str, namespace: str) -> ObservedLease:
        await self._reach()
        return self.lease_server.lease

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> ObservedLease:
        if self.candidate in self.lease_server.unreachable:
            await self._reach()
        if version != self.lease_server.lease.version:
            raise ResourceConflict("another version")
        self.lease_server.writes += 1
        stamp = str(self.lease_server.writes)
        self.lease_server.lease = ObservedLease(holder, stamp, duration_s, stamp)
        await self._reach()
        return self.lease_server.lease

    async def _reach(self) -> None:
        await asyncio.sleep(0.01)
        if self.candidate in self.lease_server.unreachable:
            raise ClusterUnavailable("connection refused")
        if self.candidate in self.lease_server.unresponsive:
            await asyncio.sleep(1e6)


class Candidates:
    """The candidates of a test. `history` records changes of leadership; two leaders fail the test."""

    def __init__(self) -> None:
        self.lease_server = LeaseServer()
        self.elections: dict[str, LeaderElection] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.active: list[str] = []
        self.max_active = 0
        self.history: list[tuple[str, str]] = []
        self.times: list[float] = []
        self.frozen_clocks: dict[str, float] = {}

    def start(self, name: str) -> LeaderElection:
        """Start a candidate."""
        election = LeaderElection(
            self.lease_server.view_for(name), "controller", "rfork", name, LEASE_S, lambda: self._clock(name)
        )
        self.elections[name] = election
        self.tasks[name] = asyncio.create_task(election.run(lambda: self._run_active(name)))
        return election

    async def stop(self, name: str) -> None:
        """Stop a candidate cleanly."""
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)

    def _clock(self, name: str) -> float:
        return self.frozen_clocks.get(name, asyncio.get_running_loop().time())

    async def _run_active(self, name: str) -> None:
        self._record(name, "begins")
        self.active.append(name)
        self.max_active = max(self.max_active, len(self.active))
        try:
            await asyncio.sleep(1e9)
        finally:
            self.active.remove(name)
            self._record(name, "ends")

    def _record(self, name: str, event: str) -> None:
        self.history.append((name, event))
        self.times.append(asyncio.get_running_loop().time())


ElectionScenario = Callable[[Candidates], Coroutine[None, None, None]]


def run_scenario(scenario: ElectionScenario) -> Candidates:
    """Run a scenario, then stop all candidates cleanly."""

    async def run() -> Candidates:
        candidates = Candidates()
        await scenario(candidates)
        for name in candidates.tasks:
            await candidates.stop(name)
        return candidates

    with contextlib.closing(VirtualLoop()) as loop:
        return loop.run_until_complete(run())
