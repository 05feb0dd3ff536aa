"""Scenarios: the planner is down, the API server rejects requests, clocks differ."""

from __future__ import annotations

import pytest

from planner.integrations.kubernetes import names
from tests.unit.planner.integrations.kubernetes.controller.controller_harness import ControllerHarness
from tests.unit.planner.integrations.kubernetes.controller.serving_workload import WORKLOAD_UID, deploy_seeds
from tests.unit.planner.integrations.kubernetes.fake_planner_api import instance


async def test_the_planner_is_down_during_a_scale_up(
    harness: ControllerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """The gate opens after the grace period, with one Event; the rest is announced after the recovery."""
    caplog.set_level("INFO")
    deployment, _ = await deploy_seeds(harness)
    harness.planner_api.unavailable = True
    await harness.step()
    harness.cluster.scale(deployment, 3)
    pods = harness.cluster.create(deployment, 2)
    await harness.reconcile()
    await harness.step(times=10)
    outage_message = "the planner does not respond; replicas that start now load from storage"
    assert [] == harness.calls()
    assert [f"Deployment/serve-1 PlannerUnavailable: {outage_message}"] == harness.events()
    harness.conditions()
    harness.cluster.ready(pods[0])
    await harness.step(harness.settings.readiness_grace_s - 1)
    assert [] == harness.conditions()
    await harness.step(1)
    assert [
        f"{pods[0].name} True UnknownToPlanner: the planner does not respond, and the containers are ready"
    ] == harness.conditions()
    assert [] == harness.costs()
    harness.planner_api.unavailable = False
    await harness.step(times=2)
    # The other one is ready and no longer expected.
    assert [f"announce {WORKLOAD_UID} 1"] == harness.calls()
    assert [
        "Deployment/serve-1 PlannerRecovered: the planner responds again",
        "Deployment/serve-1 ScaleUp: 1 replica is expected: they fork from 2 seeds",
    ] == sorted(harness.events())
    assert 2 == sum("planner" in record.message for record in caplog.records)


async def test_a_pod_starts_without_a_planner(harness: ControllerHarness) -> None:
    """Its workload gets an Event even if the Pod was ready before the outage was long enough."""
    harness = ControllerHarness(readiness_grace_s=0)
    await deploy_seeds(harness)
    harness.planner_api.unavailable = True
    await harness.step()
    (pod,) = harness.cluster.create(harness.cluster.deploy(2, 1))
    await harness.step()
    harness.cluster.ready(pod)
    await harness.step()
    assert [] == harness.events()
    await harness.step(times=5)
    assert ["Deployment/serve-2 PlannerUnavailable"] == [event.partition(":")[0] for event in harness.events()]


async def test_a_short_outage_is_not_reported(harness: ControllerHarness) -> None:
    """A planner that restarts within seconds does not affect starting Pods."""
    harness.cluster.deploy(1, 2)
    harness.planner_api.unavailable = True
    await harness.step(times=5)
    harness.planner_api.unavailable = False
    await harness.step(times=5)
    assert ["Deployment/serve-1 ScaleUp"] == [event.partition(":")[0] for event in harness.events()]


@pytest.mark.parametrize("away", [False, True])
async def test_the_gate_of_a_pod_without_a_probe_opens_by_the_planner(harness: ControllerHarness, away: bool) -> None:
    """Its container is ready as soon as it starts, which proves nothing: only the planner's state counts."""
    deployment, _ = await deploy_seeds(harness)
    harness.planner_api.unavailable = away
    (pod,) = harness.cluster.create(deployment, has_readiness_probe=False)
    harness.cluster.ready(pod)
    await harness.step(times=20)
    assert {"False"} == {line.split()[1] for line in harness.conditions()}
    if away:
        await harness.step(harness.settings.scaleup_ttl_s - 50, times=2)
    else:
        harness.planner_api.request_fork(pod)
        await harness.step(30)
        harness.planner_api.finish_fork(pod, pod)
        await harness.step()
    assert ("UnknownToPlanner:" if away else "Forked:") == harness.conditions()[-1].split()[2]


async def test_the_clock_of_a_node_does_not_change_the_grace_period(harness: ControllerHarness) -> None:
    """The grace period counts from the controller's observation; after a restart, from the kubelet's time."""
    deployment, _ = await deploy_seeds(harness)
    (pod,) = harness.cluster.create(deployment)
    harness.cluster.ready(pod)
    harness.cluster.change(pod, containers_ready_at=harness.clock.now + 3600)
    await harness.step(times=4)
    assert {"False"} == {line.split()[1] for line in harness.conditions()}
    await harness.step(times=2)
    assert [f"{pod.name} True UnknownToPlanner"] == [line.partition(":")[0] for line in harness.conditions()]


async def test_the_api_server_rejects_writes_to_some_pods(
    harness: ControllerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """Other Pods are not affected; failed writes back off and are logged once."""
    deployment = harness.cluster.deploy(1, 40)
    pods = harness.cluster.create(deployment, 40)
    for pod in pods:
        harness.cluster.ready(pod)
        harness.planner_api.become_seed(pod)
    harness.cluster.refused = {pod.name for pod in pods[:18]}
    harness.cluster.broken = {pods[19].name}
    await harness.step(times=30)
    opened = {line.partition(" ")[0] for line in harness.conditions() if " True " in line}
    assert {pod.name for pod in (pods[18], *pods[20:])} == opened
    assert 19 == sum("action=condition" in record.message for record in caplog.records)
    assert 19 * 6 >= (harness.metric("failed_actions_total", action="condition") or 0)
    harness.cluster.refused, harness.cluster.broken = set(), set()
    await harness.step(120)
    assert 19 == len(harness.conditions())


async def test_nothing_is_written_while_nothing_changes(harness: ControllerHarness) -> None:
    """A serving fleet causes no writes to the API server or the planner."""
    await deploy_seeds(harness, 5)
    await harness.step(times=50)
    assert [] == harness.calls()
    assert [] == harness.events()
    assert [] == harness.conditions()
    assert [] == harness.costs()


async def test_nothing_happens_before_the_first_list(harness: ControllerHarness) -> None:
    """A new controller whose watches have delivered nothing considers no Pod deleted."""
    _, pods = await deploy_seeds(harness)
    harness.cluster.pod_objects.clear()
    harness.controller = harness.new_leader()
    harness.controller.caches.pods.listed = False
    harness.planner_api.put_instance(instance(pods[0].uid, age_s=1000.0))
    await harness.step(times=5)
    assert [] == harness.calls()
    assert [] == harness.conditions()


async def test_a_failing_step_does_not_stop_the_others(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in one step is logged once and withdraws nothing, and all other steps run."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 2)
    await harness.step()
    harness.calls()
    monkeypatch.setattr(
        "planner.integrations.kubernetes.controller.scaleups.pending_replicas",
        lambda *_: (1 // 0, {}),
    )
    (pod,) = harness.cluster.create(deployment, gates=(names.WEIGHTS_READY,))
    harness.cluster.ready(pod)
    await harness.step(times=6)
    assert [] == harness.calls()
    assert any(f"{pod.name} True UnknownToPlanner" in line for line in harness.conditions())
    assert 1 == sum("controller step failed" in record.message for record in caplog.records)


async def test_completed_actions_are_counted(harness: ControllerHarness) -> None:
    """Completed actions are counted."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 3)
    await harness.reconcile()
    await harness.reconcile()
    assert 1 == harness.metric("actions_total", action="announce")
    assert 1 == harness.metric("actions_total", action="event")
    assert 1 == harness.metric("actions_total", action="condition")
    assert 0 == harness.metric("failed_actions_total", action="announce")
    assert 2 == harness.metric("pending_replicas")
    assert 1 == harness.metric("pods")
