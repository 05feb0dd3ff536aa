"""Scenarios: protected seeds, deleted Pods, rolling updates."""

from __future__ import annotations

import pytest

from planner.integrations.kubernetes.cluster import ObjectRef
from tests.unit.planner.integrations.kubernetes.controller.controller_harness import ControllerHarness
from tests.unit.planner.integrations.kubernetes.controller.serving_workload import WORKLOAD_UID, deploy_seeds
from tests.unit.planner.integrations.kubernetes.fake_cluster import HASH
from tests.unit.planner.integrations.kubernetes.fake_planner_api import instance, instance_id


async def test_instances_of_a_killed_pod_are_removed_immediately(harness: ControllerHarness) -> None:
    """Each is removed once, and the replacement Pod is announced."""
    _, pods = await deploy_seeds(harness, 2)
    harness.planner_api.put_instance(instance(pods[0].uid, start="11"))
    harness.cluster.delete(pods[0])
    await harness.reconcile()
    await harness.step(times=2)
    assert {
        f"announce {WORKLOAD_UID} 1", f"remove {instance_id(pods[0].uid)}",
        f"remove {instance_id(pods[0].uid, start='11')}",
    } == set(harness.calls())  # fmt: skip


async def test_an_instance_that_comes_back_is_kept(harness: ControllerHarness) -> None:
    """The Pod was force-deleted, but its node does not know that: the next heartbeat registers it again.

    A new leader keeps it too, while it sends heartbeats.
    """
    _, pods = await deploy_seeds(harness, 2)
    harness.cluster.delete(pods[0])
    await harness.step()
    harness.planner_api.become_seed(pods[0])
    await harness.step(times=3)
    assert 1 == harness.calls().count(f"remove {instance_id(pods[0].uid)}")
    harness.controller.begin()
    await harness.step(times=3)
    assert [] == [call for call in harness.calls() if "remove" in call]
    harness.planner_api.put_instance(instance(pods[0].uid, age_s=7.1))
    await harness.step()
    assert [f"remove {instance_id(pods[0].uid)}"] == harness.calls()


async def test_a_seed_whose_label_was_removed_is_kept(harness: ControllerHarness) -> None:
    """Its Pod looks deleted to a watch by label but runs: its instance is removed only once it is silent."""
    _, pods = await deploy_seeds(harness, 2)
    harness.cluster.drop(pods[0])
    await harness.reconcile()
    await harness.step(times=10)
    assert [] == [call for call in harness.calls() if "remove" in call]
    harness.planner_api.put_instance(instance(pods[0].uid, age_s=7.1))
    await harness.step()
    assert [f"remove {instance_id(pods[0].uid)}"] == [call for call in harness.calls() if "remove" in call]


async def test_the_last_seed_has_the_highest_cost(harness: ControllerHarness) -> None:
    """While Pods come and go, the only Pod with the weights always has the highest deletion cost."""
    deployment = harness.cluster.deploy(1, 2)
    first, second = harness.cluster.create(deployment, 2)
    harness.planner_api.become_seed(first)
    await harness.step(10)
    costs = [harness.costs()]
    harness.planner_api.become_seed(second)
    await harness.step(10)
    costs.append(harness.costs())
    harness.cluster.delete(first)
    await harness.step(10, times=2)
    costs.append(harness.costs())
    assert [
        [f"{first.name} 87003"], [f"{first.name} 87001", f"{second.name} 87001"], [f"{second.name} 87003"],
    ] == costs  # fmt: skip


async def test_a_rolling_update_is_announced_pod_by_pod(harness: ControllerHarness) -> None:
    """The Pods of the new ReplicaSet are announced as they are created; those that end are removed."""
    deployment, old = await deploy_seeds(harness, 3)
    event_log: list[list[str]] = []
    for pod in old:
        (new,) = harness.cluster.create(deployment, template="77777")
        await harness.step()
        harness.planner_api.request_fork(new, pod)
        await harness.step(6)
        harness.planner_api.finish_fork(new, pod)
        harness.cluster.ready(new)
        harness.cluster.change(pod, deleting=True)
        await harness.step()
        harness.cluster.delete(pod)
        await harness.step()
        event_log.append(harness.calls())
    assert [
        [f"announce {WORKLOAD_UID} 1", f"withdraw {WORKLOAD_UID}", f"remove {instance_id(pod.uid)}"] for pod in old
    ] == event_log
    assert {HASH} == {pod.labels["pod-template-hash"] for pod in old}


@pytest.mark.parametrize("known", [True, False], ids=["they fork", "the planner does not know them"])
async def test_a_rolling_update_of_a_hundred_pods_needs_few_announcements(
    harness: ControllerHarness, known: bool
) -> None:
    """25 at a time, one ready every 4 s: few announcements, and no Events."""
    deployment, old = await deploy_seeds(harness, 100)
    coming = harness.cluster.create(deployment, 25, template="77777")
    await harness.step(times=2)
    for pod in old:
        new = coming.pop(0)
        if known:
            harness.planner_api.request_fork(new, old[-1])
            harness.planner_api.finish_fork(new, old[-1])
        harness.cluster.ready(new)
        await harness.step()
        harness.cluster.delete(pod)
        if pod.uid < old[75].uid:
            coming += harness.cluster.create(deployment, template="77777")
        await harness.reconcile()
        await harness.step()
    await harness.step(times=5)
    calls = [call for call in harness.calls() if "remove" not in call]
    assert 1 == sum("withdraw" in call for call in calls)
    assert len(calls) <= 40
    assert f"announce {WORKLOAD_UID} 25" == calls[0]
    assert f"withdraw {WORKLOAD_UID}" == calls[-1]
    assert [] == [event for event in harness.events() if "ScaleUp" in event]


async def test_pods_of_a_job_are_announced(harness: ControllerHarness) -> None:
    """A Job is not watched, so its Pods count; a replacement Pod is not announced again."""
    await deploy_seeds(harness)
    job = ObjectRef("Job", "batch/v1", "default", "batch", "the-job")
    first, *_ = harness.cluster.create(None, 3, owner=job)
    await harness.step()
    harness.planner_api.request_fork(first)
    await harness.step(20)
    harness.cluster.change(first, phase="Failed")
    harness.cluster.create(None, owner=job)
    await harness.step(times=5)
    assert ["announce the-job 3", "announce the-job 3"] == [
        call for call in harness.calls() if "the-job" in call and "remove" not in call
    ]
    assert ["Job/batch ScaleUp: 3 replicas are expected: they fork from 2 seeds"] == harness.events()


async def test_a_new_leader_does_not_report_a_rolling_update(harness: ControllerHarness) -> None:
    """It finds the surge announced, and the workload's replicas unchanged."""
    deployment, _ = await deploy_seeds(harness, 4)
    harness.cluster.create(deployment, 2, template="77777")
    await harness.step()
    harness.controller = harness.new_leader()
    await harness.step(times=3)
    assert [f"announce {WORKLOAD_UID} 2"] == harness.calls()
    assert [] == harness.events()
