"""Scale-ups in the trace of whoever announces them."""

from __future__ import annotations

import math
from typing import Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from planner.app import create_app
from planner.hooks.kubernetes.controller import acting
from planner.hooks.kubernetes.controller.controller import Controller
from planner.hooks.kubernetes.controller.metrics import Metrics
from planner.hooks.rest import RestFleet
from rfork.settings import HookSettings, PlannerSettings, Settings
from tests.unit.clock import Clock
from tests.unit.hooks.kubernetes.fake_cluster import FakeCluster, uid
from tests.unit.planner.builders import FakeTime
from tests.unit.tracing.spans import Kept

ANNOUNCED: Final = "POST /v1/scaleups"
WITHDRAWN: Final = "DELETE /v1/scaleups/{scaleup_id}"


async def test_the_controllers_announcement_is_one_trace_with_the_planners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reconcile, announcement, request; looks at the lists are none, nor are they of a trace."""
    monkeypatch.setattr(acting, "ALL_S", math.inf)  # by the real clock: what is due is begun
    kept, clock = Kept(), Clock(1000.0)
    app = create_app(PlannerSettings(batch_s=0, gather_s=0), FakeTime().clock, tracer=kept.tracer)
    fleet = RestFleet(Settings(planner="http://planner"), transport=httpx.ASGITransport(app=app))
    cluster = FakeCluster(clock)
    settings, metrics = HookSettings(namespace="rfork", identity="one"), Metrics(CollectorRegistry())
    controller = Controller(settings, cluster, fleet, metrics, clock, kept.tracer)
    world = controller.world
    cluster.watch(
        lambda news: world.pods.hear(news, clock.now), lambda news: world.workloads.hear(news, clock.now)
    )
    controller.begin()
    cluster.deploy(1, 3)
    await controller.look()
    await controller.reconcile()
    await fleet.close()
    assert {
        "reconcile": None, "announce scale-up": "reconcile", ANNOUNCED: "announce scale-up",
        "write event": "reconcile",
    } == {name: kept.parent(name) for name in kept.spans}  # fmt: skip
    told = kept.attributes(ANNOUNCED)
    assert (ANNOUNCED.partition(" ")[2], 200) == (told["http.route"], told["http.response.status_code"])


async def test_a_withdrawal_names_its_scale_up() -> None:
    """By what its path says; a look at one is no span."""
    kept = Kept()
    app = create_app(PlannerSettings(), FakeTime().clock, tracer=kept.tracer)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://planner") as web:
        await web.get(f"/v1/scaleups/{uid(1)}")
        await web.delete(f"/v1/scaleups/{uid(1)}")
    assert ([WITHDRAWN], uid(1)) == (kept.names, kept.attributes(WITHDRAWN)["rfork.scaleup"])
