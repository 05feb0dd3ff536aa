"""Seeds kept, Pods that go, rolling updates."""

from __future__ import annotations

import pytest

from planner.hooks.kubernetes.cluster import ObjectRef
from tests.unit.hooks.kubernetes.controller.serving import SERVE, serving
from tests.unit.hooks.kubernetes.controller.stage import Stage
from tests.unit.hooks.kubernetes.fake_cluster import HASH
from tests.unit.hooks.kubernetes.fake_fleet import instance, instance_id


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
