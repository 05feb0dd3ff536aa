"""Candidates for one Lease, on one event loop whose time is the test's."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from planner.hooks.kubernetes.cluster import ClusterUnavailable, Conflict, LeaseSeen
from planner.hooks.kubernetes.election import Election

LEASE_S = 15.0
NO_LEASE = LeaseSeen(None, "", 0.0, "")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that has no time to lose: where it would wait, its clock jumps."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits for ever")
        self._loop.now += timeout
        return super().select(0)


@dataclass
class Shelf:
    """An API server with one Lease."""

    lease: LeaseSeen = NO_LEASE
    writes: int = 0
    away: set[str] = field(default_factory=set)
    """Candidates that do not reach it."""
    silent: set[str] = field(default_factory=set)
    """Candidates whose calls are done, but never answered."""

    def view(self, name: str) -> View:
        return View(self, name)


@dataclass
class View:
    """The API server, as one candidate reaches it."""

    shelf: Shelf
    candidate: str

    async def read_lease(self, name: str, namespace: str) -> LeaseSeen:
        await self._reach()
        return self.shelf.lease

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> LeaseSeen:
        if self.candidate in self.shelf.away:
            await self._reach()
        if version != self.shelf.lease.version:
            raise Conflict("another version")
        self.shelf.writes += 1
        stamp = str(self.shelf.writes)
        self.shelf.lease = LeaseSeen(holder, stamp, duration_s, stamp)
        await self._reach()
        return self.shelf.lease

    async def _reach(self) -> None:
        await asyncio.sleep(0.01)
        if self.candidate in self.shelf.away:
            raise ClusterUnavailable("connection refused")
        if self.candidate in self.shelf.silent:
            await asyncio.sleep(1e6)


class Candidates:
    """Those of one test; `history` has each change of who acts, with its time, and two never act at once."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.elections: dict[str, Election] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.acting: list[str] = []
        self.most_at_once = 0
        self.history: list[tuple[str, str]] = []
        self.times: list[float] = []
        self.stopped_clocks: dict[str, float] = {}

    def start(self, name: str) -> Election:
        """Another candidate."""
        election = Election(
            self.shelf.view(name), "controller", "rfork", name, LEASE_S, lambda: self._clock(name)
        )
        self.elections[name] = election
        self.tasks[name] = asyncio.create_task(election.lead(lambda: self._act(name)))
        return election

    async def stop(self, name: str) -> None:
        """Its orderly end."""
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)

    def _clock(self, name: str) -> float:
        return self.stopped_clocks.get(name, asyncio.get_running_loop().time())

    async def _act(self, name: str) -> None:
        self._tell(name, "begins")
        self.acting.append(name)
        self.most_at_once = max(self.most_at_once, len(self.acting))
        try:
            await asyncio.sleep(1e9)
        finally:
            self.acting.remove(name)
            self._tell(name, "ends")

    def _tell(self, name: str, what: str) -> None:
        self.history.append((name, what))
        self.times.append(asyncio.get_running_loop().time())


Story = Callable[[Candidates], Coroutine[None, None, None]]


def play(story: Story) -> Candidates:
    """Let a story happen, and stop all candidates in order."""

    async def told() -> Candidates:
        candidates = Candidates()
        await story(candidates)
        for name in candidates.tasks:
            await candidates.stop(name)
        return candidates

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(told())
