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

from planner.integrations.kubernetes.cluster import ClusterUnavailable, ObservedLease, ResourceConflict
from rfork.logs import logger

DEADLINE: Final = 2 / 3
"""Share of the duration after which a leader that could not renew leads no more."""
RENEW_FRACTION: Final = 1 / 5
"""Share of the duration between two renewals, or looks."""
RETRY_FRACTION: Final = 1 / 20
"""Share of the duration that is waited after a renewal that failed."""
CALL_FRACTION: Final = 1 / 8
"""Share of the duration that one call may take; several have to fit between a renewal and the deadline."""

ResultT = TypeVar("ResultT")


class LeaseClient(Protocol):
    """Of a `Cluster`, what an election needs."""

    async def read_lease(self, name: str, namespace: str) -> ObservedLease:
        """See `Cluster`."""

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> ObservedLease:
        """See `Cluster`."""


class LeaderElection:
    """One candidate for one Lease. For one event loop; `run` runs once at a time."""

    def __init__(
        self,
        cluster: LeaseClient,
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
        self._renew_interval_s = lease_s * RENEW_FRACTION
        self._clock = clock
        self._until: float | None = None
        self._may_hold_lease = False
        self._version = ""
        self._holder: str | None = None
        self._failures: dict[str, str] = {}
        self._log = logger(__name__).bind(lease=f"{namespace}/{name}")

    @property
    def is_leader(self) -> bool:
        """Whether this process leads now; to be asked before each act that only a leader may do."""
        return self._until is not None and self._clock() < self._until

    @property
    def holder(self) -> str | None:
        """Who holds the Lease, as it was seen last."""
        return self._holder

    async def run(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
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
                    leadership_lost = await self._keep_renewed(task)
                finally:
                    await _end(task)
                if not leadership_lost:
                    return await task
                self._until = None
                if not task.cancelled() and (error := task.exception()) is not None:
                    self._log.error("leader_failed", why=repr(error))
                self._log.warning("leads_no_more", holder=self._holder)
        finally:
            self._until = None
            await self._release()

    async def _acquire(self) -> None:
        """Wait until the Lease is held."""
        lease, since = None, self._clock()
        while True:
            now = await self._observe_lease()
            if now is not None:
                # One that was deleted tells nothing of its holder, who may not have noticed yet.
                if lease is None or (now.version and now.renewed != lease.renewed):
                    lease, since = now, self._clock()
                with contextlib.suppress(ResourceConflict):  # another candidate was faster
                    if self._can_acquire(lease, since) and await self._write(now.version):
                        return
            await asyncio.sleep(self._renew_interval_s * random.uniform(0.8, 1.2))

    def _can_acquire(self, lease: ObservedLease, since: float) -> bool:
        """Whether nobody holds what has looked like this since then."""
        if lease.holder is None or lease.holder == self.identity:
            return True
        return self._clock() - since >= (lease.duration_s or self._lease_s)

    async def _keep_renewed(self, task: asyncio.Task[None]) -> bool:
        """Renew until it is lost (True), or until the task has ended (False)."""
        wait_s = self._renew_interval_s
        while True:
            await asyncio.wait({task}, timeout=min(wait_s, self._remaining_s()))
            if task.done():
                return False
            if not self.is_leader:
                return True
            try:
                renewed = await self._write(self._version)
            except ResourceConflict:
                renewed = False
                seen = await self._observe_lease()
                if seen is not None and seen.holder != self.identity:
                    return True
                # Ours: the answer to an earlier renewal was lost.
                self._version = seen.version if seen is not None else self._version
            wait_s = self._lease_s * (RENEW_FRACTION if renewed else RETRY_FRACTION)

    async def _write(self, version: str) -> bool:
        """Take or renew the Lease; where that succeeds this process leads, counted from before it asked.

        Raises Conflict.
        """
        requested_at, self._may_hold_lease, self._version = self._clock(), True, version
        request = self._cluster.write_lease(self._name, self._namespace, self.identity, self._lease_s, version)
        lease = await self._call_with_deadline("write", request)
        if lease is None:
            return False
        self._version, self._holder = lease.version, lease.holder
        self._until = requested_at + self._lease_s * DEADLINE
        return self.is_leader

    async def _observe_lease(self) -> ObservedLease | None:
        """The Lease; None where it cannot be seen."""
        lease = await self._call_with_deadline("read", self._cluster.read_lease(self._name, self._namespace))
        if lease is not None:
            self._holder = lease.holder
        return lease

    async def _release(self) -> None:
        """Let others take the Lease at once, also where the last write was done and its answer never came.

        What another holds by now is left alone.
        """
        while self._may_hold_lease:
            self._may_hold_lease = False
            request = self._cluster.write_lease(self._name, self._namespace, None, self._lease_s, self._version)
            try:
                await self._call_with_deadline("write", request)
            except ResourceConflict:
                seen = await self._observe_lease()
                if seen is not None and seen.holder == self.identity:
                    self._may_hold_lease, self._version = True, seen.version

    async def _call_with_deadline(self, what: str, call: Awaitable[ResultT]) -> ResultT | None:
        """What a call answers, if it does soon enough; None, and one log line for each cause, otherwise."""
        limit_s = self._lease_s * CALL_FRACTION
        limit_s = limit_s if self._until is None else min(limit_s, self._remaining_s())
        try:
            async with asyncio.timeout(limit_s):
                result = await call
        except (ClusterUnavailable, TimeoutError) as error:
            why = str(error) or "no answer in time"
            if why != self._failures.get(what):
                self._log.warning("lease_unavailable", why=why)
            self._failures[what] = why
            return None
        self._failures.pop(what, None)
        return result

    def _remaining_s(self) -> float:
        return max(0.0, (self._until or 0.0) - self._clock())


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel the task, and wait until it has ended, also where this itself is cancelled meanwhile."""
    cancelled = False
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
