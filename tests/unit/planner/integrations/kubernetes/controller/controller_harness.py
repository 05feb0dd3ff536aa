"""A cluster, a planner and a controller, advanced step by step."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from planner.integrations.kubernetes.controller.actions import ControllerMetrics
from planner.integrations.kubernetes.controller.controller import Controller
from rfork.settings import KubernetesSettings
from rfork.tracing import NOOP_TRACER
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.integrations.kubernetes.fake_cluster import Event, FakeCluster
from tests.unit.planner.integrations.kubernetes.fake_planner_api import FakePlannerApi

POLL_INTERVAL_S: Final = 2.0
NOW: Final = 1000.0


class ControllerHarness:
    """`controller` is the leader."""

    def __init__(self, **settings: float) -> None:
        self.clock = FakeClock(NOW)
        self.settings = KubernetesSettings(namespace="rfork", identity="one", **settings)  # type: ignore[arg-type]
        self.cluster = FakeCluster(self.clock)
        self.planner_api = FakePlannerApi(self.clock)
        self.registry = CollectorRegistry()
        self.tracer = NOOP_TRACER
        self.controller = self.new_leader()

    def new_leader(self) -> Controller:
        """Return a new replica of the controller that has listed the cluster and becomes the leader."""
        self.registry = CollectorRegistry()
        controller = Controller(
            self.settings,
            self.cluster,
            self.planner_api,
            ControllerMetrics(self.registry),
            self.clock,
            self.tracer,
        )
        self.cluster.watch(controller.caches)
        controller.begin()
        return controller

    async def reconcile(self) -> None:
        """Reconcile after a change in the cluster, without polling the planner."""
        await self.controller.reconcile()

    async def step(self, seconds: float = POLL_INTERVAL_S, times: int = 1) -> None:
        """Advance the clock, poll the planner and reconcile."""
        for _ in range(times):
            self.clock.now += seconds
            await self.controller.refresh()
            await self.controller.reconcile()

    def calls(self) -> list[str]:
        """Return the calls to the planner since the last time."""
        calls, self.planner_api.calls = self.planner_api.calls, []
        return calls

    def events(self) -> list[str]:
        """Return the Events since the last time: ``OBJECT REASON: MESSAGE``."""
        events, self.cluster.events = self.cluster.events, list[Event]()
        return [f"{one.about} {one.reason}: {one.message}" for one in events]

    def conditions(self) -> list[str]:
        """Return the conditions written since the last time: ``POD STATUS REASON: MESSAGE``."""
        return self._writes("condition")

    def costs(self) -> list[str]:
        """Return the deletion costs written since the last time: ``POD VALUE``."""
        return self._writes("annotate")

    def metric(self, name: str, **labels: str) -> float | None:
        """Return a sample of the current controller's metrics."""
        return self.registry.get_sample_value(f"rfork_controller_{name}", labels)

    def _writes(self, operation: str) -> list[str]:
        found = [write for write in self.cluster.writes if write.operation == operation]
        self.cluster.writes = [write for write in self.cluster.writes if write.operation != operation]
        return [f"{write.pod} {write.value}" for write in found]
