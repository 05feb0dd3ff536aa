"""The controller's process: watches in every replica, and the loop of the one that leads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

from planner.hooks.fleet import Fleet
from planner.hooks.heeding import heed_cancellation
from planner.hooks.kubernetes.cluster import Cluster, ClusterUnavailable, News
from planner.hooks.kubernetes.controller.controller import Clock, Controller
from planner.hooks.kubernetes.controller.metrics import Metrics
from planner.hooks.kubernetes.controller.world import Kept, Seen
from planner.hooks.kubernetes.election import Election
from planner.hooks.probes import Status
from rfork.logs import logger
from rfork.settings import HookSettings
from rfork.tracing import OFF, Tracer

DEBOUNCE_S: Final = 0.1
"""How long news is gathered: what is scaled makes many objects at once."""
SHARE: Final = 4.0
"""Where news does not end, a pause is this many times the processor time that was used before it."""


async def run(
    settings: HookSettings,
    cluster: Cluster,
    fleet: Fleet,
    status: Status,
    *,
    clock: Clock = time.time,
    tracer: Tracer = OFF,
) -> None:
    """Watch, and act while this replica leads; until cancelled, at which it gives up the lead.

    Metrics are put into `status.registry`. Raises ClusterUnavailable where a watch ends, which none does.
    """
    election = Election(cluster, settings.lease, settings.namespace, settings.identity, settings.lease_s)
    loop = _Loop(settings, cluster, fleet, status, election, clock, tracer)
    world = loop.controller.world
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(loop.follow("pods", cluster.pods(), world.pods))
        tasks.create_task(loop.follow("workloads", cluster.workloads(), world.workloads))
        tasks.create_task(loop.stand())
        tasks.create_task(loop.settle())


class _Loop:
    """What wakes the controller, and how often."""

    def __init__(
        self,
        settings: HookSettings,
        cluster: Cluster,
        fleet: Fleet,
        status: Status,
        election: Election,
        clock: Clock,
        tracer: Tracer,
    ) -> None:
        self._metrics = Metrics(status.registry)
        self.controller = Controller(settings, cluster, fleet, self._metrics, clock, tracer)
        self._look_s = settings.look_s
        self._status = status
        self._election = election
        self._clock = clock
        self._listed = asyncio.Event()
        self._news = asyncio.Event()
        self._trouble = ""
        self._log = logger(__name__)
        status.leader(False)
        status.not_ready("it has not seen the cluster's Pods yet")

    async def follow(self, name: str, watch: AsyncIterator[News[Seen]], kept: Kept[Seen]) -> None:
        """Take in what one watch says."""
        async for news in watch:
            kept.hear(news, self._clock())
            if self.controller.world.listed:
                self._listed.set()
                self._news.set()
        raise ClusterUnavailable(f"the watch of {name} ended")

    async def stand(self) -> None:
        """Stand for the lead, once there is something to decide by: who sees nothing must not hold it."""
        await self._listed.wait()
        await self._election.lead(self._lead)

    async def settle(self) -> None:
        """It is ready once it leads, or knows who does: from then on nothing is missed."""
        await self._listed.wait()
        self._status.not_ready("nobody leads yet")
        while self._election.holder is None:
            await asyncio.sleep(DEBOUNCE_S)
        self._status.ready()

    async def _lead(self) -> None:
        """Look and reconcile, for ever."""
        self.controller.begin()
        self._told(True)
        try:
            next_look = time.monotonic()
            while True:
                began, used = time.monotonic(), time.thread_time()
                due = began >= next_look
                self._news.clear()
                await self._once(look=due)
                heed_cancellation()
                next_look = began + self._look_s if due else next_look
                await self._wait(next_look, time.thread_time() - used)
        finally:
            self._told(False)

    async def _once(self, *, look: bool) -> None:
        try:
            if look:
                await self.controller.look()
            await self.controller.reconcile(lambda: self._election.leads)
        except Exception as error:  # a defect: the next time may go well, and the watches go on
            why = f"{type(error).__name__}: {error}"
            if why != self._trouble:
                self._log.exception("reconciling failed")
            self._trouble = why
        else:
            self._trouble = ""

    async def _wait(self, until: float, used_s: float) -> None:
        """Until the next look or until there is news, gathered for a while. `used_s`: processor time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._news.wait()
        # Also where a look takes longer than the time between two.
        await asyncio.sleep(min(max(DEBOUNCE_S, SHARE * used_s), self._look_s))

    def _told(self, leads: bool) -> None:
        self._status.leader(leads)
        self._metrics.leader.set(leads)
        if not leads:  # what only a leader knows
            self._metrics.planner_away.set(0)
            self._metrics.coming.set(0)
            self._metrics.mixed_versions.set(0)
