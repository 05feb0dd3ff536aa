"""Scale-ups in the trace of the client that announces them."""

from __future__ import annotations

import math
from typing import Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from planner.app import create_app
from planner.integrations.kubernetes.controller import actions
from planner.integrations.kubernetes.controller.actions import ControllerMetrics
from planner.integrations.kubernetes.controller.controller import Controller
from planner.integrations.planner_api import AsyncPlannerClient
from rfork.settings import InstanceSettings, KubernetesSettings, PlannerSettings
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.builders import FakeTime
from tests.unit.planner.integrations.kubernetes.fake_cluster import FakeCluster, uid
from tests.unit.planner.threadsafe_asgi_transport import ThreadsafeAsgiTransport
from tests.unit.tracing.span_recorder import SpanRecorder

ANNOUNCED: Final = "POST /v1/scaleups"
WITHDRAWN: Final = "DELETE /v1/scaleups/{scaleup_id}"


async def test_an_announcement_is_one_trace_in_controller_and_planner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reconcile, announcement and request. Polls of the lists have no spans and no trace context."""
    monkeypatch.setattr(actions, "TOTAL_TIMEOUT_S", math.inf)  # by the real clock, so that all due actions start
    recorder, clock = SpanRecorder(), FakeClock(1000.0)
    app = create_app(PlannerSettings(batch_window_s=0, scaleup_wait_s=0), FakeTime().clock, tracer=recorder.tracer)
    planner_api = AsyncPlannerClient(InstanceSettings(planner="http://planner"), ThreadsafeAsgiTransport(app))
    cluster = FakeCluster(clock)
    settings, metrics = (
        KubernetesSettings(namespace="rfork", identity="one"),
        ControllerMetrics(CollectorRegistry()),
    )
    controller = Controller(settings, cluster, planner_api, metrics, clock, recorder.tracer)
    cluster.watch(controller.caches)
    controller.begin()
    cluster.deploy(1, 3)
    await controller.refresh()
    await controller.reconcile()
    await planner_api.close()
    assert {
        "reconcile": None, "announce scale-up": "reconcile", ANNOUNCED: "announce scale-up",
        "write event": "reconcile",
    } == {name: recorder.parent(name) for name in recorder.spans}  # fmt: skip
    attributes = recorder.attributes(ANNOUNCED)
    assert ANNOUNCED.partition(" ")[2] == attributes["http.route"]
    assert 200 == attributes["http.response.status_code"]


async def test_the_span_of_a_withdrawal_has_the_scale_up_id() -> None:
    """From the path of the request. Reading a scale-up has no span."""
    recorder = SpanRecorder()
    app = create_app(PlannerSettings(), FakeTime().clock, tracer=recorder.tracer)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://planner") as web:
        await web.get(f"/v1/scaleups/{uid(1)}")
        await web.delete(f"/v1/scaleups/{uid(1)}")
    assert [WITHDRAWN] == recorder.names
    assert uid(1) == recorder.attributes(WITHDRAWN)["rfork.scaleup"]
