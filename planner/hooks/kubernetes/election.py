"""Which of several replicas acts: the one that holds a Lease, and only while it surely does.

No clock of another machine is believed. A candidate takes a Lease over once it has looked at it for the
holder's duration by its own clock, and saw nothing change. The holder counts from before it asked for its
last renewal, and stops acting after two thirds of the duration: so it has stopped by the time that anybody
else may begin, whether it can reach the API server or not.

What remains is a process that stands still together with its clock (a virtual machine that is paused): it
acts until its next renewal is refused, a fifth of the duration later at most. What a leader does must bear
that.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, Protocol, TypeVar

from planner.hooks.kubernetes.cluster import ClusterUnavailable, Conflict, LeaseSeen
from rfork.logs import logger

DEADLINE: Final = 2 / 3
"""Share of the duration after which a leader that could not renew leads no more."""
EVERY: Final = 1 / 5
"""Share of the duration between two renewals, or looks."""
AGAIN: Final = 1 / 20
"""Share of the duration that is waited after a renewal that failed."""
PATIENCE: Final = 1 / 8
"""Share of the duration that one call may take; several have to fit between a renewal and the deadline."""

Answer = TypeVar("Answer")


class Leases(Protocol):
    """Of a `Cluster`, what an election needs."""

    async def read_lease(self, name: str, namespace: str) -> LeaseSeen:
        """See `Cluster`."""

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> LeaseSeen:
        """See `Cluster`."""


class Election:
    """One candidate for one Lease. For one event loop; `lead` runs once at a time."""

    def __init__(
        self,
        cluster: Leases,
        name: str,
        namespace: str,
        identity: str,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds, never backwards. `identity` is what people read in the Lease."""
        self._cluster = cluster
        self._name = name
        self._namespace = namespace
        # A process that was killed and comes again with its name waits like any other: perhaps it lives.
        self.identity: Final = f"{identity}_{secrets.token_hex(4)}"
        self._lease_s = lease_s
        self._every_s = lease_s * EVERY
        self._clock = clock
        self._until: float | None = None
        self._asked = False
        self._version = ""
        self._holder: str | None = None
        self._failures: dict[str, str] = {}
        self._log = logger(__name__).bind(lease=f"{namespace}/{name}")

    @property
    def leads(self) -> bool:
        """Whether this process leads now; to be asked before each act that only a leader may do."""
        return self._until is not None and self._clock() < self._until

    @property
    def holder(self) -> str | None:
        """Who holds the Lease, as it was seen last."""
        return self._holder

    async def lead(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `work` whenever this process leads, and cancel it as soon as it does no more; for ever.

        Returns, or raises what `work` raised, when `work` ends by itself. Then, and where this is cancelled,
        it waits for the end of `work` and gives the Lease up, so that the next leader need not wait. API
        servers that are away, refusals and conflicts are logged, once for each cause, and never raised.
        """
        try:
            while True:
                await self._acquire()
                self._log.info("leads", identity=self.identity)
                task = asyncio.create_task(work(), name="rfork-leader")
                try:
                    lost = await self._keep(task)
                finally:
                    await _end(task)
                if not lost:
                    return await task
                self._until = None
                if not task.cancelled() and (error := task.exception()) is not None:
                    self._log.error("leader_failed", why=repr(error))
                self._log.warning("leads_no_more", holder=self._holder)
        finally:
            self._until = None
            await self._give_up()

    async def _acquire(self) -> None:
        """Wait until the Lease is held."""
        seen, since = None, self._clock()
        while True:
            now = await self._look()
            if now is not None:
                # One that was deleted tells nothing of its holder, who may not have noticed yet.
                if seen is None or (now.version and now.renewed != seen.renewed):
                    seen, since = now, self._clock()
                with contextlib.suppress(Conflict):  # another candidate was faster
                    if self._may_take(seen, since) and await self._write(now.version):
                        return
            await asyncio.sleep(self._every_s * random.uniform(0.8, 1.2))

    def _may_take(self, lease: LeaseSeen, since: float) -> bool:
        """Whether nobody holds what has looked like this since then."""
        if lease.holder is None or lease.holder == self.identity:
            return True
        return self._clock() - since >= (lease.duration_s or self._lease_s)

    async def _keep(self, task: asyncio.Task[None]) -> bool:
        """Renew until it is lost (True), or until the task has ended (False)."""
        wait_s = self._every_s
        while True:
            await asyncio.wait({task}, timeout=min(wait_s, self._remaining_s()))
            if task.done():
                return False
            if not self.leads:
                return True
            try:
                renewed = await self._write(self._version)
            except Conflict:
                renewed = False
                seen = await self._look()
                if seen is not None and seen.holder != self.identity:
                    return True
                # Ours: the answer to an earlier renewal was lost.
                self._version = seen.version if seen is not None else self._version
            wait_s = self._lease_s * (EVERY if renewed else AGAIN)

    async def _write(self, version: str) -> bool:
        """Take or renew the Lease; where that succeeds this process leads, counted from before it asked.

        Raises Conflict.
        """
        begun, self._asked, self._version = self._clock(), True, version
        asked = self._cluster.write_lease(self._name, self._namespace, self.identity, self._lease_s, version)
        lease = await self._in_time("write", asked)
        if lease is None:
            return False
        self._version, self._holder = lease.version, lease.holder
        self._until = begun + self._lease_s * DEADLINE
        return self.leads

    async def _look(self) -> LeaseSeen | None:
        """The Lease; None where it cannot be seen."""
        lease = await self._in_time("read", self._cluster.read_lease(self._name, self._namespace))
        if lease is not None:
            self._holder = lease.holder
        return lease

    async def _give_up(self) -> None:
        """Let others take the Lease at once, also where the last write was done and its answer never came.

        What another holds by now is left alone.
        """
        while self._asked:
            self._asked = False
            asked = self._cluster.write_lease(self._name, self._namespace, None, self._lease_s, self._version)
            try:
                await self._in_time("write", asked)
            except Conflict:
                seen = await self._look()
                if seen is not None and seen.holder == self.identity:
                    self._asked, self._version = True, seen.version

    async def _in_time(self, what: str, call: Awaitable[Answer]) -> Answer | None:
        """What a call answers, if it does soon enough; None, and one log line for each cause, otherwise."""
        limit_s = self._lease_s * PATIENCE
        limit_s = limit_s if self._until is None else min(limit_s, self._remaining_s())
        try:
            async with asyncio.timeout(limit_s):
                answer = await call
        except (ClusterUnavailable, TimeoutError) as error:
            why = str(error) or "no answer in time"
            if why != self._failures.get(what):
                self._log.warning("lease_unavailable", why=why)
            self._failures[what] = why
            return None
        self._failures.pop(what, None)
        return answer

    def _remaining_s(self) -> float:
        return max(0.0, (self._until or 0.0) - self._clock())


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel the task, and wait until it has ended, also where this itself is cancelled meanwhile."""
    interrupted = False
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            interrupted = True
    if interrupted:
        raise asyncio.CancelledError
