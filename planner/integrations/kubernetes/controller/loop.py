"""The controller's main loop: watches in every replica, reconciles in the leader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

from planner.integrations.cancellation import raise_if_cancelled
from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes.cluster import Cluster, ClusterUnavailable, WatchEvent
from planner.integrations.kubernetes.controller.caches import ObservedT, ResourceCache
from planner.integrations.kubernetes.controller.controller import Clock, Controller
from planner.integrations.kubernetes.controller.metrics import ControllerMetrics
from planner.integrations.kubernetes.leader_election import LeaderElection
from planner.integrations.planner_api import PlannerApi
from rfork.logs import logger
from rfork.settings import KubernetesSettings
from rfork.tracing import NOOP_TRACER, Tracer

DEBOUNCE_S: Final = 0.1
"""Time for which changes are collected: scaling changes many objects at the same time."""
CPU_PAUSE_FACTOR: Final = 4.0
"""Under constant changes, each pause is this many times the CPU time used before it."""


async def run(
    settings: KubernetesSettings,
    cluster: Cluster,
    planner_api: PlannerApi,
    status: IntegrationStatus,
    *,
    clock: Clock = time.time,
    tracer: Tracer = NOOP_TRACER,
) -> None:
    """Watch the cluster, and act while this replica is the leader, until cancelled. Then release leadership.

    Registers its metrics in `status.registry`. Raises ClusterUnavailable if a watch ends, which should not
    happen.
    """
    election = LeaderElection(cluster, settings.lease, settings.namespace, settings.identity, settings.lease_duration_s)
    loop = _ReconcileLoop(settings, cluster, planner_api, status, election, clock, tracer)
    caches = loop.controller.caches
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(loop.follow("pods", cluster.pods(), caches.pods))
        tasks.create_task(loop.follow("workloads", cluster.workloads(), caches.workloads))
        tasks.create_task(loop.run_standby())
        tasks.create_task(loop.report_readiness())


class _ReconcileLoop:
    """Wakes the controller when something changed, with rate limits."""

    def __init__(
        self,
        settings: KubernetesSettings,
        cluster: Cluster,
        planner_api: PlannerApi,
        status: IntegrationStatus,
        election: LeaderElection,
        clock: Clock,
        tracer: Tracer,
    ) -> None:
        self._metrics = ControllerMetrics(status.registry)
        self.controller = Controller(settings, cluster, planner_api, self._metrics, clock, tracer)
        self._poll_interval_s = settings.poll_interval_s
        self._status = status
        self._election = election
        self._clock = clock
        self._listed = asyncio.Event()
        self._changed = asyncio.Event()
        self._last_error = ""
        self._log = logger(__name__)
        status.leader(False)
        status.not_ready("the cluster's Pods are not listed yet")

    async def follow(
        self, name: str, watch: AsyncIterator[WatchEvent[ObservedT]], cache: ResourceCache[ObservedT]
    ) -> None:
        """Update a cache from one watch."""
        async for event in watch:
            cache.apply(event, self._clock())
            if self.controller.caches.listed:
                self._listed.set()
                self._changed.set()
        raise ClusterUnavailable(f"the watch of {name} ended")

    async def run_standby(self) -> None:
        """Take part in the leader election once the caches are complete."""
        await self._listed.wait()
        await self._election.run(self._lead)

    async def report_readiness(self) -> None:
        """Report ready once this replica leads or knows the leader: from then on no change is missed."""
        await self._listed.wait()
        self._status.not_ready("no leader elected yet")
        while self._election.holder is None:
            await asyncio.sleep(DEBOUNCE_S)
        self._status.ready()

    async def _lead(self) -> None:
        """Poll and reconcile forever."""
        self.controller.begin()
        self._set_leading(True)
        try:
            next_poll_at = time.monotonic()
            while True:
                began, used = time.monotonic(), time.thread_time()
                due = began >= next_poll_at
                self._changed.clear()
                await self._reconcile_once(poll_first=due)
                raise_if_cancelled()
                next_poll_at = began + self._poll_interval_s if due else next_poll_at
                await self._wait(next_poll_at, time.thread_time() - used)
        finally:
            self._set_leading(False)

    async def _reconcile_once(self, *, poll_first: bool) -> None:
        try:
            if poll_first:
                await self.controller.refresh()
            await self.controller.reconcile(lambda: self._election.is_leader)
        except Exception as error:  # a bug: the next attempt may succeed, and the watches must keep running
            error_text = f"{type(error).__name__}: {error}"
            if error_text != self._last_error:
                self._log.exception("controller failed to reconcile, retrying")
            self._last_error = error_text
        else:
            self._last_error = ""

    async def _wait(self, until: float, used_s: float) -> None:
        """Wait for the next poll, or for a batch of changes. `used_s`: CPU time of the last reconcile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._changed.wait()
        # Pause even if a poll takes longer than the poll interval.
        await asyncio.sleep(min(max(DEBOUNCE_S, CPU_PAUSE_FACTOR * used_s), self._poll_interval_s))

    def _set_leading(self, leads: bool) -> None:
        self._status.leader(leads)
        self._metrics.leader.set(leads)
        if not leads:  # reset the values that only a leader knows
            self._metrics.planner_down.set(0)
            self._metrics.pending_replicas.set(0)
            self._metrics.mixed_versions.set(0)
