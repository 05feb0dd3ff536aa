"""Hooks and planner in one trace, sent by their processes to a collector; and one that takes nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from planner.hooks.kubernetes.controller.controller import Controller
from planner.hooks.kubernetes.controller.metrics import Metrics
from planner.hooks.rest import RestFleet
from planner.hooks.running import CONTROLLER
from rfork.settings import HookSettings, Settings, TracingSettings
from rfork.tracing import queue
from rfork.tracing.sdk import sending_tracer
from tests.collector import PATIENT, collecting
from tests.conftest import StartRfork
from tests.integration.test_hooks import POD, Folder, mutate, review, told_planner, trusting
from tests.processes import at_start
from tests.unit.clock import Clock
from tests.unit.hooks.kubernetes.fake_cluster import FakeCluster

READY: Final = r'"event": ?"ready"'


async def test_a_scale_up_is_one_trace_over_controller_and_planner(
    rfork_process: StartRfork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins where the controller acts, and goes on in the planner's process."""
    monkeypatch.setattr(queue, "CLOSE_S", 60.0)
    with collecting() as collector:
        environment = {"RFORK_TRACING_ENDPOINT": collector.url, **at_start(tmp_path / "patch", PATIENT)}
        planner = rfork_process("planner", "--port", "0", "--json", until=READY, environment=environment)
        url = json.loads(planner.wait_for(rf"^.*{READY}.*$").group())["url"]
        tracer = sending_tracer(collector.url, TracingSettings(), CONTROLLER)
        clock, fleet = Clock(1000.0), RestFleet(Settings(planner=url))
        cluster = FakeCluster(clock)
        settings, metrics = HookSettings(namespace="rfork", identity="one"), Metrics(CollectorRegistry())
        controller = Controller(settings, cluster, fleet, metrics, clock, tracer)
        world = controller.world
        cluster.watch(
            lambda news: world.pods.hear(news, clock.now), lambda news: world.workloads.hear(news, clock.now)
        )
        controller.begin()
        deployment = cluster.deploy(1, 3)
        await controller.look()
        await controller.reconcile()
        await fleet.close()
        tracer.close()
        planner.signal(signal.SIGTERM)
        planner.wait()
        (announced,) = collector.named("announce scale-up")
        (asked,) = collector.named("POST /v1/scaleups")
        (begun,) = collector.named("reconcile")
    assert (begun.trace_id, "", begun.span_id, announced.span_id, begun.trace_id) == (
        announced.trace_id, begun.parent, announced.parent, asked.parent, asked.trace_id,
    )  # fmt: skip
    assert ("rfork-controller", "rfork-planner", deployment.name) == (
        announced.service, asked.service, announced.attributes["k8s.deployment.name"],
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.parametrize("hangs", [False, True], ids=["takes spans", "hangs"])
def test_a_webhook_answers_whatever_its_collector_does(
    rfork_process: StartRfork, folder: Folder, hangs: bool
) -> None:
    """Pods are changed in the API server's trace; a collector that hangs holds neither them nor its end."""
    with collecting(hangs=hangs) as collector:
        environment = {
            "HOME": str(folder.path),
            "KUBECONFIG": str(folder.path / "none"),
            "RFORK_HOOK_PLANNER": "http://planner:8700",
            "RFORK_HOOK_CERTIFICATES": str(folder.path),
            "RFORK_HOOK_WEBHOOK_PORT": "0",
            "RFORK_HOOK_HEALTH_PORT": "0",
            "RFORK_TRACING_ENDPOINT": collector.url,
            **({} if hangs else at_start(folder.path / "patch", PATIENT)),
        }
        process = rfork_process("hook", "webhook", until="webhook is up", environment=environment)
        url = process.wait_for(r"webhook is up.*url=(\S+)")[1]
        caller = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
        first = httpx.post(f"{url}/mutate", json=review(POD), verify=trusting(folder.own), headers=caller)
        assert (200, True) == (first.status_code, collector.asked.wait(30))
        assert ["http://planner:8700"] == told_planner(mutate(url, folder.own))
        process.signal(signal.SIGTERM)
        assert 0 == process.wait()
    reviews = collector.named("POST /mutate")
    assert ([] if hangs else [("1" * 32, "2" * 16, "rfork-webhook", "default")]) == [
        (span.trace_id, span.parent, span.service, span.attributes["k8s.namespace.name"])
        for span in reviews[:1]
    ]
