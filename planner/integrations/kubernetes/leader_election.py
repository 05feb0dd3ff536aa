"""Leader election with a Lease: one of several replicas acts, and only while its leadership is certain.

Clocks of other machines are not trusted. A candidate acquires a Lease after it has observed no change for the
holder's duration by its own clock. The holder counts from before it sent its last renewal, and stops acting
after two thirds of the duration. So it has stopped before another replica can start, whether it reaches the
API server or not. (The elections of kubernetes 37 and kubernetes_asyncio 36 measure with the wall clock, which
may jump, and do not limit a call, so a leader that waits for a response leads beyond its deadline.)

One case remains: a process that is paused together with its clock (a suspended virtual machine) acts until
its next renewal is rejected, at most a fifth of the duration later. The leader's actions must tolerate that.

The webhook observes the same Lease, because the controller opens the readiness gate. Without a controller, a
gated Pod would never become ready, so the webhook adds the gate only if it has recently observed a renewal. A
Lease that does not change during observation has no holder.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, TypeVar

from planner.integrations.kubernetes.api_server import ClusterUnavailable, ResourceConflict
from planner.integrations.kubernetes.cluster import Cluster, ObservedLease
from rfork.asyncio_timeout import timeout
from rfork.logs import logger
from rfork.settings import KubernetesSettings

DEADLINE_FRACTION: Final = 2 / 3
"""Fraction of the duration after which a leader that could not renew stops leading."""
RENEW_FRACTION: Final = 1 / 5
"""Fraction of the duration between two renewals or polls."""
RETRY_FRACTION: Final = 1 / 20
"""Fraction of the duration to wait after a failed renewal."""
CALL_FRACTION: Final = 1 / 8
"""Fraction of the duration that one call may take: several must fit between a renewal and the deadline."""

ResultT = TypeVar("ResultT")
LEASE_GRACE_FACTOR: Final = 2.0
"""Multiple of the Lease's duration for which a renewal counts. By then another replica has taken over, if
there is one.
"""
MAX_POLL_S: Final = 5.0
"""Maximum seconds between two polls."""


class LeaderElection:
    """One candidate for one Lease. For one event loop; `run` must not run twice at a time."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        namespace: str,
        identity: str,
        lease_duration_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: monotonic seconds. `identity`: readable prefix of the holder's name in the Lease."""
        self._cluster = cluster
        self._name = name
        self._namespace = namespace
        # Unique per process: a killed process that restarts with its name waits like any other, because the
        # old one may be alive.
        self.identity: Final = f"{identity}_{secrets.token_hex(4)}"
        self._lease_duration_s = lease_duration_s
        self._renew_interval_s = lease_duration_s * RENEW_FRACTION
        self._clock = clock
        self._until: float | None = None
        self._may_own_lease = False
        self._version = ""
        self._holder: str | None = None
        self._failures: dict[str, str] = {}
        self._log = logger(__name__).bind(lease=f"{namespace}/{name}")

    @property
    def is_leader(self) -> bool:
        """True if this process leads now. Check before each action that only the leader may take."""
        return self._until is not None and self._clock() < self._until

    @property
    def holder(self) -> str | None:
        """Holder of the Lease when it was last observed."""
        return self._holder

    async def run(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `work` whenever this process leads, and cancel it when leadership is lost, forever.

        If `work` ends, returns or raises its exception. Then, or if cancelled, waits for the end of `work`
        and releases the Lease, so that the next leader need not wait. Unreachable API servers, rejections and
        conflicts are logged once per cause and never raised.
        """
        try:
            while True:
                await self._acquire()
                self._log.info("controller became the leader", identity=self.identity)
                task = asyncio.create_task(work(), name="rfork-leader")
                try:
                    leadership_lost = await self._keep_renewed(task)
                finally:
                    await _cancel_and_wait(task)
                if not leadership_lost:
                    return await task
                self._until = None
                if not task.cancelled() and (error := task.exception()) is not None:
                    self._log.error("leading controller failed", reason=f"{type(error).__name__}: {error}")
                self._log.warning("controller is no longer the leader", holder=self._holder)
        finally:
            self._until = None
            await self._release()

    async def _acquire(self) -> None:
        """Wait until the Lease is acquired."""
        lease, since = None, self._clock()
        while True:
            now = await self._observe_lease()
            if now is not None:
                # A deleted Lease does not end the wait: its holder may not have noticed yet.
                if lease is None or (now.version and now.renewed != lease.renewed):
                    lease, since = now, self._clock()
                with contextlib.suppress(ResourceConflict):  # another candidate was faster
                    if self._can_acquire(lease, since) and await self._write(now.version):
                        return
            await asyncio.sleep(self._renew_interval_s * random.uniform(0.8, 1.2))

    def _can_acquire(self, lease: ObservedLease, since: float) -> bool:
        """Return True if the Lease is free, or unchanged since `since` for its full duration."""
        if lease.holder is None or lease.holder == self.identity:
            return True
        return self._clock() - since >= (lease.duration_s or self._lease_duration_s)

    async def _keep_renewed(self, task: asyncio.Task[None]) -> bool:
        """Renew the Lease until it is lost (True) or the task has ended (False)."""
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
                # Our own write: the response to an earlier renewal was lost.
                self._version = seen.version if seen is not None else self._version
            wait_s = self._lease_duration_s * (RENEW_FRACTION if renewed else RETRY_FRACTION)

    async def _write(self, version: str) -> bool:
        """Acquire or renew the Lease. On success this process leads, counted from before the request.

        Raises ResourceConflict.
        """
        requested_at, self._may_own_lease, self._version = self._clock(), True, version
        request = self._cluster.write_lease(self._name, self._namespace, self.identity, self._lease_duration_s, version)
        lease = await self._call_with_deadline("write", request)
        if lease is None:
            return False
        self._version, self._holder = lease.version, lease.holder
        self._until = requested_at + self._lease_duration_s * DEADLINE_FRACTION
        return self.is_leader

    async def _observe_lease(self) -> ObservedLease | None:
        """Return the Lease, or None if it cannot be read."""
        lease = await self._call_with_deadline("read", self._cluster.read_lease(self._name, self._namespace))
        if lease is not None:
            self._holder = lease.holder
        return lease

    async def _release(self) -> None:
        """Release the Lease immediately, even if the response to the last write was lost.

        A Lease of another holder is left alone.
        """
        while self._may_own_lease:
            self._may_own_lease = False
            request = self._cluster.write_lease(
                self._name, self._namespace, None, self._lease_duration_s, self._version
            )
            try:
                await self._call_with_deadline("write", request)
            except ResourceConflict:
                seen = await self._observe_lease()
                if seen is not None and seen.holder == self.identity:
                    self._may_own_lease, self._version = True, seen.version

    async def _call_with_deadline(self, what: str, call: Awaitable[ResultT]) -> ResultT | None:
        """Return the result of a call within the deadline. Otherwise log once per cause and return None."""
        limit_s = self._lease_duration_s * CALL_FRACTION
        limit_s = limit_s if self._until is None else min(limit_s, self._remaining_s())
        try:
            async with timeout(limit_s):
                result = await call
        except (ClusterUnavailable, TimeoutError) as error:
            reason = str(error) or "no response in time"
            if reason != self._failures.get(what):
                self._log.warning(
                    f"cannot {what} the Lease that elects the leading controller", lease=self._name, reason=reason
                )
            self._failures[what] = reason
            return None
        self._failures.pop(what, None)
        return result

    def _remaining_s(self) -> float:
        return max(0.0, (self._until or 0.0) - self._clock())


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Cancel the task and wait for its end, even if this call is cancelled meanwhile."""
    cancelled = False
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


class LeaderWatch:
    """Observed state of the controller's Lease, in the memory of the webhook's process. For one event loop."""

    def __init__(self, settings: KubernetesSettings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._name, self._namespace = settings.lease, settings.namespace
        self._lease_duration_s = settings.lease_duration_s
        self._poll_interval_s = min(settings.poll_interval_s, MAX_POLL_S, settings.lease_duration_s / 2)
        self._monotonic = monotonic
        self._lease: ObservedLease | None = None
        self._observed_at = 0.0
        self._until: float | None = None
        self._logged_reason: str | None = None
        self._log = logger(__name__).bind(lease=f"{settings.namespace}/{settings.lease}")

    def __call__(self) -> bool:
        """Return True if a controller leads now. Reads memory only."""
        return self._until is not None and self._monotonic() < self._until

    async def follow(self, cluster: Cluster) -> None:
        """Poll the Lease forever. While it cannot be read, no controller counts as the leader."""
        while True:
            began = self._monotonic()
            try:
                self.observe(await cluster.read_lease(self._name, self._namespace), began)
            except ClusterUnavailable as error:
                self._until = None
                self._log_change(f"the Lease cannot be read: {error}")
            await asyncio.sleep(self._poll_interval_s)

    def observe(self, lease: ObservedLease, at: float) -> None:
        """Record the Lease, whose request was sent at this time of the clock.

        A change since the previous observation happened after that was requested. How long after is unknown,
        so it counts from then.
        """
        previous, self._lease = self._lease, lease
        previous_at, self._observed_at = self._observed_at, at
        if lease.holder is None:
            self._until = None
        elif previous is not None and lease.renewed != previous.renewed:
            self._until = previous_at + LEASE_GRACE_FACTOR * (lease.duration_s or self._lease_duration_s)
        if self():
            self._log_change("")
        elif lease.holder is None:
            self._log_change("the Lease has no holder")
        elif previous is not None:
            self._log_change("the Lease is not renewed")

    def _log_change(self, reason: str) -> None:
        """Log each change of what Pods get. An empty reason: a controller leads."""
        if reason == self._logged_reason:
            return
        self._logged_reason = reason
        if reason:
            self._log.warning("no controller leads: new Pods get no readiness gate", reason=reason)
        else:
            self._log.info("a controller leads: new Pods get the readiness gate")
