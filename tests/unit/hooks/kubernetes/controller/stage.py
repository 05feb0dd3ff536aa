"""A cluster, a planner and a controller between them, moved step by step."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from planner.hooks.kubernetes.controller.controller import Controller
from planner.hooks.kubernetes.controller.metrics import Metrics
from rfork.settings import HookSettings
from rfork.tracing import OFF
from tests.unit.clock import Clock
from tests.unit.hooks.kubernetes.fake_cluster import Event, FakeCluster
from tests.unit.hooks.kubernetes.fake_fleet import FakeFleet

LOOK_S: Final = 2.0
NOW: Final = 1000.0


class Stage:
    """`controller` leads."""

    def __init__(self, **settings: float) -> None:
        self.clock = Clock(NOW)
        self.settings = HookSettings(namespace="rfork", identity="one", **settings)  # type: ignore[arg-type]
        self.cluster = FakeCluster(self.clock)
        self.fleet = FakeFleet(self.clock)
        self.registry = CollectorRegistry()
        self.tracer = OFF
        self.controller = self.another()

    def another(self) -> Controller:
        """A replica of the controller, that sees what there is and leads from now on."""
        self.registry = CollectorRegistry()
        made = Controller(
            self.settings, self.cluster, self.fleet, Metrics(self.registry), self.clock, self.tracer
        )
        pods, workloads = made.world.pods, made.world.workloads
        self.cluster.watch(
            lambda news: pods.hear(news, self.clock.now), lambda news: workloads.hear(news, self.clock.now)
        )
        made.begin()
        return made

    async def news(self) -> None:
        """The controller acts because something happened in the cluster, between two looks."""
        await self.controller.reconcile()

    async def step(self, seconds: float = LOOK_S, times: int = 1) -> None:
        """Time passes, and the controller looks at the planner and acts."""
        for _ in range(times):
            self.clock.now += seconds
            await self.controller.look()
            await self.controller.reconcile()

    def calls(self) -> list[str]:
        """What was asked of the planner since the last time."""
        asked, self.fleet.calls = self.fleet.calls, []
        return asked

    def events(self) -> list[str]:
        """Events since the last time: ``OBJECT REASON: MESSAGE``."""
        told, self.cluster.events = self.cluster.events, list[Event]()
        return [f"{one.about} {one.reason}: {one.message}" for one in told]

    def conditions(self) -> list[str]:
        """Conditions written since the last time: ``POD STATUS REASON: MESSAGE``."""
        return self._writes("condition")

    def costs(self) -> list[str]:
        """Costs written since the last time: ``POD VALUE``."""
        return self._writes("annotate")

    def metric(self, name: str, **labels: str) -> float | None:
        """A sample of the present controller's metrics."""
        return self.registry.get_sample_value(f"rfork_controller_{name}", labels)

    def _writes(self, what: str) -> list[str]:
        found = [write for write in self.cluster.writes if write.what == what]
        self.cluster.writes = [write for write in self.cluster.writes if write.what != what]
        return [f"{write.pod} {write.value}" for write in found]
