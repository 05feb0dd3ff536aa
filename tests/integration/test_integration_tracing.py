"""Traces across integrations and planner, sent to a collector; and a collector that does not respond."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from planner.integrations.kubernetes.controller.actions import ControllerMetrics
from planner.integrations.kubernetes.controller.controller import Controller
from planner.integrations.planner_api import AsyncPlannerClient
from planner.integrations.runner import CONTROLLER
from rfork.settings import InstanceSettings, KubernetesSettings, TracingSettings
from rfork.tracing import sdk
from rfork.tracing.sdk import otlp_tracer
from tests.conftest import StartRfork
from tests.integration.test_integration_runner import (
    POD,
    WebhookCertificates,
    injected_planner_urls,
    mutate,
    review,
    trusted_context,
)
from tests.otlp_collector import LONG_FLUSH_PATCH, running_collector
from tests.processes import startup_patch
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.integrations.kubernetes.fake_cluster import FakeCluster

READY: Final = r'"event": ?"ready"'


async def test_a_scale_up_is_one_trace_across_controller_and_planner(
    rfork_process: StartRfork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace begins in the controller and continues in the planner's process."""
    monkeypatch.setattr(sdk, "CLOSE_S", 60.0)
    with running_collector() as collector:
        environment = {
            "RFORK_TRACING_ENDPOINT": collector.url,
            **startup_patch(tmp_path / "patch", LONG_FLUSH_PATCH),
        }
        planner = rfork_process("planner", "--port", "0", "--json", until=READY, environment=environment)
        url = json.loads(planner.wait_for(rf"^.*{READY}.*$").group())["url"]
        tracer = otlp_tracer(collector.url, TracingSettings(), CONTROLLER)
        clock, fleet = FakeClock(1000.0), AsyncPlannerClient(InstanceSettings(planner=url))
        cluster = FakeCluster(clock)
        settings, metrics = (
            KubernetesSettings(namespace="rfork", identity="one"),
            ControllerMetrics(CollectorRegistry()),
        )
        controller = Controller(settings, cluster, fleet, metrics, clock, tracer)
        cluster.watch(controller.caches)
        controller.begin()
        deployment = cluster.deploy(1, 3)
        await controller.refresh()
        await controller.reconcile()
        await fleet.close()
        tracer.close()
        planner.signal(signal.SIGTERM)
        planner.wait()
        (announced,) = collector.spans_named("announce scale-up")
        (scaleup_span,) = collector.spans_named("POST /v1/scaleups")
        (begun,) = collector.spans_named("reconcile")
    assert begun.trace_id == announced.trace_id
    assert "" == begun.parent
    assert begun.span_id == announced.parent
    assert announced.span_id == scaleup_span.parent
    assert begun.trace_id == scaleup_span.trace_id
    assert "rfork-controller" == announced.service
    assert "rfork-planner" == scaleup_span.service
    assert deployment.name == announced.attributes["k8s.deployment.name"]


@pytest.fixture
def folder(tmp_path: Path) -> WebhookCertificates:
    return WebhookCertificates(tmp_path)


@pytest.mark.parametrize("hangs", [False, True], ids=["collector responds", "hangs"])
def test_a_webhook_responds_with_any_collector(
    rfork_process: StartRfork, folder: WebhookCertificates, hangs: bool
) -> None:
    """Its spans belong to the API server's trace; a hanging collector delays neither responses nor exit."""
    with running_collector(hangs=hangs) as collector:
        environment = {
            "HOME": str(folder.path),
            "KUBECONFIG": str(folder.path / "none"),
            "RFORK_K8S_POD_PLANNER_URL": "http://planner:8700",
            "RFORK_K8S_CERTIFICATE_DIR": str(folder.path),
            "RFORK_K8S_WEBHOOK_PORT": "0",
            "RFORK_K8S_HEALTH_PORT": "0",
            "RFORK_TRACING_ENDPOINT": collector.url,
            **({} if hangs else startup_patch(folder.path / "patch", LONG_FLUSH_PATCH)),
        }
        process = rfork_process("k8s", "webhook", until="webhook ready", environment=environment)
        url = process.wait_for(r"webhook ready.*url=(\S+)")[1]
        caller = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
        first = httpx.post(f"{url}/mutate", json=review(POD), verify=trusted_context(folder.own), headers=caller)
        assert 200 == first.status_code
        assert collector.request_received.wait(30)
        assert ["http://planner:8700"] == injected_planner_urls(mutate(url, folder.own))
        process.signal(signal.SIGTERM)
        assert 0 == process.wait()
    reviews = collector.spans_named("POST /mutate")
    assert ([] if hangs else [("1" * 32, "2" * 16, "rfork-webhook", "default")]) == [
        (span.trace_id, span.parent, span.service, span.attributes["k8s.namespace.name"]) for span in reviews[:1]
    ]
