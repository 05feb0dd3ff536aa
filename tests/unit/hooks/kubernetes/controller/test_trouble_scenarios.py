"""The planner is away, the API server refuses, clocks differ: what the controller does then."""

from __future__ import annotations

import pytest

from planner.hooks.kubernetes import names
from tests.unit.hooks.kubernetes.controller.serving import SERVE, serving
from tests.unit.hooks.kubernetes.controller.stage import Stage
from tests.unit.hooks.kubernetes.fake_fleet import instance


async def test_the_planner_is_away_during_a_scale_up(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The gate opens after the grace; the workload is told once; what waited is announced once it is back."""
    caplog.set_level("INFO")
    deployment, _ = await serving(stage)
    stage.fleet.away = True
    await stage.step()
    stage.cluster.scale(deployment, 3)
    pods = stage.cluster.create(deployment, 2)
    await stage.news()
    await stage.step(times=10)
    told = "the planner does not answer: replicas that start now load by themselves"
    assert ([], [f"Deployment/serve-1 PlannerAway: {told}"]) == (stage.calls(), stage.events())
    stage.conditions()
    stage.cluster.ready(pods[0])
    await stage.step(stage.settings.grace_s - 1)
    assert [] == stage.conditions()
    await stage.step(1)
    assert [
        f"{pods[0].name} True UnknownToPlanner: the planner does not answer, and the containers are ready"
    ] == stage.conditions()
    assert [] == stage.costs()
    stage.fleet.away = False
    await stage.step(times=2)
    # The other one is ready: it does not come any more.
    assert [f"announce {SERVE} 1"] == stage.calls()
    assert [
        "Deployment/serve-1 PlannerBack: the planner answers again",
        "Deployment/serve-1 ScaleUp: 1 replica is expected: they fork from 2 seeds",
    ] == sorted(stage.events())
    assert 2 == sum("planner" in record.message for record in caplog.records)


async def test_a_pod_that_starts_without_a_planner(stage: Stage) -> None:
    """Its workload is told also where it was ready before the silence was long enough; others are not."""
    stage = Stage(grace_s=0)
    await serving(stage)
    stage.fleet.away = True
    await stage.step()
    (pod,) = stage.cluster.create(stage.cluster.deploy(2, 1))
    await stage.step()
    stage.cluster.ready(pod)
    await stage.step()
    assert [] == stage.events()
    await stage.step(times=5)
    assert ["Deployment/serve-2 PlannerAway"] == [event.partition(":")[0] for event in stage.events()]


async def test_a_short_silence_is_not_told(stage: Stage) -> None:
    """A planner that restarts within seconds is no news to those who start meanwhile."""
    stage.cluster.deploy(1, 2)
    stage.fleet.away = True
    await stage.step(times=5)
    stage.fleet.away = False
    await stage.step(times=5)
    assert ["Deployment/serve-1 ScaleUp"] == [event.partition(":")[0] for event in stage.events()]


@pytest.mark.parametrize("away", [False, True])
async def test_the_gate_of_a_pod_without_a_probe(stage: Stage, away: bool) -> None:
    """Its container is ready as soon as it starts, which says nothing: the planner has the word."""
    deployment, _ = await serving(stage)
    stage.fleet.away = away
    (pod,) = stage.cluster.create(deployment, probed=False)
    stage.cluster.ready(pod)
    await stage.step(times=20)
    assert {"False"} == {line.split()[1] for line in stage.conditions()}
    if away:
        await stage.step(stage.settings.scaleup_s - 50, times=2)
    else:
        stage.fleet.asks(pod)
        await stage.step(30)
        stage.fleet.forked(pod, pod)
        await stage.step()
    assert ("UnknownToPlanner:" if away else "Forked:") == stage.conditions()[-1].split()[2]


async def test_a_node_whose_clock_is_ahead(stage: Stage) -> None:
    """The grace is counted from when the controller saw the Pod ready; a new one goes on by the kubelet's."""
    deployment, _ = await serving(stage)
    (pod,) = stage.cluster.create(deployment)
    stage.cluster.ready(pod)
    stage.cluster.change(pod, containers_ready_at=stage.clock.now + 3600)
    await stage.step(times=4)
    assert {"False"} == {line.split()[1] for line in stage.conditions()}
    await stage.step(times=2)
    assert [f"{pod.name} True UnknownToPlanner"] == [line.partition(":")[0] for line in stage.conditions()]


async def test_api_server_refuses_some_pods(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be done for one Pod is done for the others, tried more and more rarely, and logged once."""
    deployment = stage.cluster.deploy(1, 40)
    pods = stage.cluster.create(deployment, 40)
    for pod in pods:
        stage.cluster.ready(pod)
        stage.fleet.serves(pod)
    stage.cluster.refused = {pod.name for pod in pods[:18]}
    stage.cluster.broken = {pods[19].name}
    await stage.step(times=30)
    opened = {line.partition(" ")[0] for line in stage.conditions() if " True " in line}
    assert {pod.name for pod in (pods[18], *pods[20:])} == opened
    assert 19 == sum("action=condition" in record.message for record in caplog.records)
    assert 19 * 6 >= (stage.metric("failed_actions_total", action="condition") or 0)
    stage.cluster.refused, stage.cluster.broken = set(), set()
    await stage.step(120)
    assert 19 == len(stage.conditions())


async def test_nothing_is_written_while_nothing_changes(stage: Stage) -> None:
    """A fleet that serves costs the API server and the planner's records nothing."""
    await serving(stage, 5)
    await stage.step(times=50)
    assert ([], [], [], []) == (stage.calls(), stage.events(), stage.conditions(), stage.costs())


async def test_before_all_is_seen_nothing_is_done(stage: Stage) -> None:
    """A new controller whose watches have brought nothing takes nobody for gone."""
    _, pods = await serving(stage)
    stage.cluster.pods_there.clear()
    stage.controller = stage.another()
    stage.controller.world.pods.listed = False
    stage.fleet.has(instance(pods[0].uid, age_s=1000.0))
    await stage.step(times=5)
    assert ([], []) == (stage.calls(), stage.conditions())


async def test_a_part_that_fails_does_not_stop_the_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect in one decision is logged once, withdraws nothing, and all others are made."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 2)
    await stage.step()
    stage.calls()
    monkeypatch.setattr("planner.hooks.kubernetes.controller.coming.coming", lambda *_: (1 // 0, {}))
    (pod,) = stage.cluster.create(deployment, gates=(names.WEIGHTS_READY,))
    stage.cluster.ready(pod)
    await stage.step(times=6)
    assert [] == stage.calls()
    assert any(f"{pod.name} True UnknownToPlanner" in line for line in stage.conditions())
    assert 1 == sum("does not work" in record.message for record in caplog.records)


async def test_metrics(stage: Stage) -> None:
    """What was done is counted."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 3)
    await stage.news()
    await stage.news()
    assert 1 == stage.metric("actions_total", action="announce")
    assert 1 == stage.metric("actions_total", action="event")
    assert 1 == stage.metric("actions_total", action="condition")
    assert 0 == stage.metric("failed_actions_total", action="announce")
    assert 2 == stage.metric("coming_replicas")
    assert 1 == stage.metric("pods")
