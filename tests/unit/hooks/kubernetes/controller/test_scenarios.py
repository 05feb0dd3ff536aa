from __future__ import annotations

import pytest

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import ObjectRef, PodSeen, WorkloadSeen
from tests.unit.hooks.kubernetes.controller.stage import Stage
from tests.unit.hooks.kubernetes.fake_cluster import HASH, uid
from tests.unit.hooks.kubernetes.fake_fleet import instance, instance_id

SERVE = uid(1)


@pytest.fixture
def stage() -> Stage:
    """A cluster with nothing in it."""
    return Stage()


async def serving(stage: Stage, replicas: int = 1) -> tuple[WorkloadSeen, list[PodSeen]]:
    """A Deployment whose Pods are seeds, and of which all has been said."""
    deployment = stage.cluster.deploy(1, replicas)
    pods = stage.cluster.create(deployment, replicas)
    for pod in pods:
        stage.fleet.serves(pod)
        stage.cluster.ready(pod)
    await stage.step(times=2)
    stage.calls(), stage.events(), stage.conditions(), stage.costs()
    return deployment, pods


async def test_a_scale_up_is_announced_before_its_pods_exist(stage: Stage) -> None:
    """As soon as spec.replicas rises from 1 to 4, three are announced; people are told on the workload."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    assert [f"announce {SERVE} 3"] == stage.calls()
    assert ["Deployment/serve-1 ScaleUp: 3 replicas are expected: they fork from 2 seeds"] == stage.events()
    assert stage.fleet.scaleup_views[SERVE].scaleup.by == "deployment/default/serve-1"
    assert stage.fleet.scaleup_views[SERVE].scaleup.expires_in_s == stage.settings.scaleup_s


async def test_what_could_not_be_told_is_told_later(stage: Stage) -> None:
    """The API server takes no Event for a while: once it does, people are told, once."""
    deployment, _ = await serving(stage)
    stage.cluster.away = True
    stage.cluster.scale(deployment, 4)
    await stage.step(times=3)
    stage.cluster.away = False
    await stage.step(times=20)
    assert [f"announce {SERVE} 3"] == stage.calls()
    assert ["Deployment/serve-1 ScaleUp: 3 replicas are expected: they fork from 2 seeds"] == stage.events()


async def test_what_is_gone_is_not_told_of_for_ever(stage: Stage) -> None:
    """A workload that went before it could be told: its namespace may be gone, which takes no Event again."""
    deployment, _ = await serving(stage)
    stage.cluster.away = True
    stage.cluster.scale(deployment, 4)
    await stage.step()
    stage.cluster.remove_workload(deployment)
    await stage.step()
    failed = stage.metric("failed_actions_total", action="event")
    await stage.step(times=200)
    assert failed == stage.metric("failed_actions_total", action="event")


async def test_pods_that_are_made_change_nothing_that_was_announced(stage: Stage) -> None:
    """The Pods of an announced scale-up are those that were announced."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    stage.calls()
    stage.cluster.create(deployment, 2)
    await stage.step()
    stage.cluster.create(deployment)
    await stage.step()
    assert [] == stage.calls()


async def test_arrivals_are_counted_down(stage: Stage) -> None:
    """The planner does it by itself: it is told only that nobody is waited for any more."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    pods = stage.cluster.create(deployment, 3)
    stage.calls(), stage.events()
    told: list[list[str]] = []
    for pod in pods:
        stage.fleet.asks(pod)
        await stage.step(times=2)
        told.append(stage.calls())
    assert [[], [], [f"withdraw {SERVE}"]] == told
    assert [] == [event for event in stage.events() if "ScaleUp" in event]


async def test_a_fork_is_followed_to_its_end(stage: Stage) -> None:
    """The gate says how far it is, and opens; the Event names a source; then the Pod is worth keeping."""
    deployment, seeds = await serving(stage, 2)
    stage.cluster.scale(deployment, 3)
    (pod,) = stage.cluster.create(deployment)
    await stage.step()
    stage.fleet.asks(pod, *seeds)
    await stage.step(6)
    stage.fleet.receives(pod, 43, *seeds)
    await stage.step(6)
    stage.fleet.forked(pod, *seeds)
    await stage.step(0.4)
    assert [
        f"{pod.name} False Waiting: no rank has asked for its weights yet",
        f"{pod.name} False Receiving: receiving: 0 % of 15.2 GB",
        f"{pod.name} False Receiving: receiving: 43 % of 15.2 GB",
        f"{pod.name} True Forked: 1 rank is whole: 15.2 GB",
    ] == stage.conditions()
    first = min(seeds, key=lambda seed: seed.name)
    assert f"Pod/{pod.name} Forked: forked 15.2 GB from {first.name} in 12.0 s, 2 sources" in stage.events()
    await stage.step(10, times=3)
    read, idle = [f"{seed.name} 87002" for seed in seeds], [f"{seed.name} 87001" for seed in seeds]
    assert [*read, f"{pod.name} 87001", *idle] == stage.costs()
    assert [] == stage.events()


async def test_a_new_start_of_the_controller_goes_on(stage: Stage) -> None:
    """In the middle of a scale-up it announces and tells nothing a second time, and counts on."""
    deployment, seeds = await serving(stage, 2)
    stage.cluster.scale(deployment, 5)
    await stage.news()
    pods = stage.cluster.create(deployment, 3)
    for pod in pods[:2]:
        stage.fleet.asks(pod, *seeds)
    await stage.step(12)
    stage.fleet.forked(pods[0], *seeds)
    await stage.step()
    stage.calls(), stage.events(), stage.costs()
    stage.controller = stage.another()
    await stage.step(times=2)
    assert ([], [], []) == (stage.calls(), stage.events(), stage.costs())
    stage.fleet.asks(pods[2], *seeds)
    stage.fleet.forked(pods[1], *seeds)
    await stage.step(times=2)
    assert [f"withdraw {SERVE}"] == stage.calls()
    assert [f"Pod/{pods[1].name} Forked"] == [event.partition(":")[0] for event in stage.events()]


async def test_the_lead_is_handed_over(stage: Stage) -> None:
    """Who leads no more does nothing; who leads now does it once."""
    deployment, _ = await serving(stage)
    before = stage.controller
    stage.controller = stage.another()
    stage.cluster.scale(deployment, 2)
    await before.look()
    await before.reconcile(lambda: False)
    assert [] == stage.calls()
    await stage.step()
    assert [f"announce {SERVE} 1"] == stage.calls()


async def test_a_scale_up_that_falls_is_withdrawn(stage: Stage) -> None:
    """Scaled up, and down again before any Pod came."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    stage.cluster.scale(deployment, 1)
    await stage.news()
    await stage.step()
    assert [f"announce {SERVE} 3", f"withdraw {SERVE}"] == stage.calls()


async def test_what_a_workload_that_is_gone_announced_is_withdrawn(stage: Stage) -> None:
    """Also by a controller that started anew in between."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    stage.calls()
    stage.controller = stage.another()
    stage.cluster.remove_workload(deployment)
    await stage.step(times=2)
    assert f"withdraw {SERVE}" in stage.calls()


async def test_replicas_that_never_come_are_not_waited_for_any_more(stage: Stage) -> None:
    """After `scaleup_s` nothing is announced, though they are still wanted, until more are."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 3)
    await stage.news()
    stage.calls()
    await stage.step(stage.settings.scaleup_s - 1)
    assert [] == stage.calls()
    await stage.step(times=2)
    assert [f"withdraw {SERVE}"] == stage.calls()
    stage.cluster.scale(deployment, 4)
    await stage.news()
    assert [f"announce {SERVE} 3"] == stage.calls()


async def test_a_planner_that_lost_its_memory_is_told_again(stage: Stage) -> None:
    """A scale-up that it does not know is announced once more, for the time that is left; people are not."""
    deployment, pods = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    stage.calls(), stage.events()
    stage.fleet.restart()
    stage.fleet.serves(pods[0])
    await stage.step(100)
    assert [f"announce {SERVE} 3"] == stage.calls()
    assert stage.settings.scaleup_s - 100 == stage.fleet.scaleup_views[SERVE].scaleup.expires_in_s
    assert [] == stage.events()


async def test_a_planner_that_was_started_anew_is_no_scale_up(stage: Stage) -> None:
    """It knows nobody for a moment: nothing is announced, written or told because of that."""
    deployment, seeds = await serving(stage, 2)
    stage.cluster.scale(deployment, 3)
    (pod,) = stage.cluster.create(deployment)
    await stage.step()
    stage.fleet.asks(pod, *seeds)
    await stage.step(10, times=2)
    stage.calls(), stage.events(), stage.conditions(), stage.costs()
    stage.fleet.restart()
    await stage.step()
    assert ([], [], []) == (stage.calls(), stage.events(), stage.costs())
    for seed in seeds:
        stage.fleet.serves(seed)
    stage.fleet.asks(pod, *seeds)
    await stage.step(times=10)
    assert ([], [], []) == (stage.calls(), stage.events(), stage.costs())


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


async def test_instances_of_a_killed_pod_are_removed_at_once(stage: Stage) -> None:
    """Once each, and the Pod that comes in its stead is announced."""
    _, pods = await serving(stage, 2)
    stage.fleet.has(instance(pods[0].uid, start="11"))
    stage.cluster.delete(pods[0])
    await stage.news()
    await stage.step(times=2)
    assert {
        f"announce {SERVE} 1", f"remove {instance_id(pods[0].uid)}",
        f"remove {instance_id(pods[0].uid, start='11')}",
    } == set(stage.calls())  # fmt: skip


async def test_an_instance_that_comes_back_is_left_alone(stage: Stage) -> None:
    """The Pod was deleted by force, its node knows nothing of it: the next heartbeat registers it again.

    Another replica that comes to lead leaves it alone too, while it is heard of.
    """
    _, pods = await serving(stage, 2)
    stage.cluster.delete(pods[0])
    await stage.step()
    stage.fleet.serves(pods[0])
    await stage.step(times=3)
    assert 1 == stage.calls().count(f"remove {instance_id(pods[0].uid)}")
    stage.controller.begin()
    await stage.step(times=3)
    assert [] == [call for call in stage.calls() if "remove" in call]
    stage.fleet.has(instance(pods[0].uid, age_s=7.1))
    await stage.step()
    assert [f"remove {instance_id(pods[0].uid)}"] == stage.calls()


async def test_a_seed_whose_label_was_taken_away_serves_on(stage: Stage) -> None:
    """To a watch by label its Pod is gone, but nobody deleted it: only once it is silent it is removed."""
    _, pods = await serving(stage, 2)
    stage.cluster.vanish(pods[0])
    await stage.news()
    await stage.step(times=10)
    assert [] == [call for call in stage.calls() if "remove" in call]
    stage.fleet.has(instance(pods[0].uid, age_s=7.1))
    await stage.step()
    assert [f"remove {instance_id(pods[0].uid)}"] == [call for call in stage.calls() if "remove" in call]


async def test_the_last_seed_goes_last(stage: Stage) -> None:
    """Of Pods that come and go, the one that alone holds the weights always costs the most."""
    deployment = stage.cluster.deploy(1, 2)
    first, second = stage.cluster.create(deployment, 2)
    stage.fleet.serves(first)
    await stage.step(10)
    costs = [stage.costs()]
    stage.fleet.serves(second)
    await stage.step(10)
    costs.append(stage.costs())
    stage.cluster.delete(first)
    await stage.step(10, times=2)
    costs.append(stage.costs())
    assert [
        [f"{first.name} 87003"], [f"{first.name} 87001", f"{second.name} 87001"], [f"{second.name} 87003"],
    ] == costs  # fmt: skip


async def test_a_rolling_update(stage: Stage) -> None:
    """The Pods of the new ReplicaSet are announced as they are made; those that go are removed."""
    deployment, old = await serving(stage, 3)
    told: list[list[str]] = []
    for pod in old:
        (new,) = stage.cluster.create(deployment, template="77777")
        await stage.step()
        stage.fleet.asks(new, pod)
        await stage.step(6)
        stage.fleet.forked(new, pod)
        stage.cluster.ready(new)
        stage.cluster.change(pod, deleting=True)
        await stage.step()
        stage.cluster.delete(pod)
        await stage.step()
        told.append(stage.calls())
    assert [
        [f"announce {SERVE} 1", f"withdraw {SERVE}", f"remove {instance_id(pod.uid)}"] for pod in old
    ] == told
    assert {HASH} == {pod.labels["pod-template-hash"] for pod in old}


@pytest.mark.parametrize("known", [True, False], ids=["they fork", "the planner never hears of them"])
async def test_a_rolling_update_of_a_hundred(stage: Stage, known: bool) -> None:
    """25 at a time, one of them ready each 4 s: few announcements, and nothing that people are told."""
    deployment, old = await serving(stage, 100)
    coming = stage.cluster.create(deployment, 25, template="77777")
    await stage.step(times=2)
    for pod in old:
        new = coming.pop(0)
        if known:
            stage.fleet.asks(new, old[-1])
            stage.fleet.forked(new, old[-1])
        stage.cluster.ready(new)
        await stage.step()
        stage.cluster.delete(pod)
        if pod.uid < old[75].uid:
            coming += stage.cluster.create(deployment, template="77777")
        await stage.news()
        await stage.step()
    await stage.step(times=5)
    calls = [call for call in stage.calls() if "remove" not in call]
    assert 1 == sum("withdraw" in call for call in calls)
    assert len(calls) <= 40
    assert (f"announce {SERVE} 25", f"withdraw {SERVE}") == (calls[0], calls[-1])
    assert [] == [event for event in stage.events() if "ScaleUp" in event]


async def test_pods_of_a_job_are_told_of(stage: Stage) -> None:
    """It is not watched: its Pods are what it is; one that comes in another's place is no news."""
    await serving(stage)
    job = ObjectRef("Job", "batch/v1", "default", "batch", "the-job")
    first, *_ = stage.cluster.create(None, 3, owner=job)
    await stage.step()
    stage.fleet.asks(first)
    await stage.step(20)
    stage.cluster.change(first, phase="Failed")
    stage.cluster.create(None, owner=job)
    await stage.step(times=5)
    assert ["announce the-job 3", "announce the-job 3"] == [
        call for call in stage.calls() if "the-job" in call and "remove" not in call
    ]
    assert ["Job/batch ScaleUp: 3 replicas are expected: they fork from 2 seeds"] == stage.events()


async def test_a_rolling_update_is_told_by_no_new_leader(stage: Stage) -> None:
    """It finds the surge announced, and the workload's own replicas as they were."""
    deployment, _ = await serving(stage, 4)
    stage.cluster.create(deployment, 2, template="77777")
    await stage.step()
    stage.controller = stage.another()
    await stage.step(times=3)
    assert ([f"announce {SERVE} 2"], []) == (stage.calls(), stage.events())


async def test_a_fall_is_told_after_two_looks(stage: Stage) -> None:
    """One that is over by the next look was none: the planner's lists were fetched at different moments."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    stage.cluster.scale(deployment, 3)
    await stage.news()
    stage.cluster.scale(deployment, 4)
    await stage.step()
    assert [f"announce {SERVE} 3"] == stage.calls()
    stage.cluster.scale(deployment, 3)
    await stage.news()
    await stage.news()
    assert [] == stage.calls()
    await stage.step()
    assert [f"announce {SERVE} 2"] == stage.calls()
    assert 1 == len(stage.events())


async def test_pods_that_no_node_takes_are_not_waited_for(stage: Stage) -> None:
    """Those that have a node come without them; once they get one too, they are announced."""
    deployment, _ = await serving(stage)
    stage.cluster.scale(deployment, 4)
    await stage.news()
    pods = stage.cluster.create(deployment, 3)
    for pod in pods[1:]:
        stage.cluster.change(pod, conditions={"PodScheduled": False})
    await stage.step(times=2)
    assert [f"announce {SERVE} 3", f"announce {SERVE} 1"] == stage.calls()
    stage.fleet.asks(pods[0])
    await stage.step(stage.settings.scaleup_s, times=2)
    assert [f"withdraw {SERVE}"] == stage.calls()
    for pod in pods[1:]:
        stage.cluster.change(
            pod, node="node-2", conditions={"PodScheduled": True}, scheduled_at=stage.clock.now
        )
    await stage.step(times=2)
    assert [f"announce {SERVE} 2"] == stage.calls()
    assert 1 == sum("ScaleUp" in event for event in stage.events())


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
    monkeypatch.setattr("planner.hooks.kubernetes.controller.scaling.coming", lambda *_: (1 // 0, {}))
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
