"""Scenarios of scale-ups: announced, counted down, withdrawn."""

from __future__ import annotations

from tests.unit.planner.integrations.kubernetes.controller.controller_harness import ControllerHarness
from tests.unit.planner.integrations.kubernetes.controller.serving_workload import WORKLOAD_UID, deploy_seeds


async def test_a_scale_up_is_announced_before_its_pods_exist(harness: ControllerHarness) -> None:
    """When spec.replicas rises from 1 to 4, three are announced immediately, with an Event on the workload."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 4)
    await harness.reconcile()
    assert [f"announce {WORKLOAD_UID} 3"] == harness.calls()
    assert ["Deployment/serve-1 ScaleUp: 3 replicas are expected: they fork from 2 seeds"] == harness.events()
    assert harness.planner_api.scaleup_views[WORKLOAD_UID].scaleup.announced_by == "deployment/default/serve-1"
    assert harness.planner_api.scaleup_views[WORKLOAD_UID].scaleup.expires_in_s == harness.settings.scaleup_ttl_s


async def test_a_failed_event_is_written_later(harness: ControllerHarness) -> None:
    """While the API server rejects Events, they are kept; afterwards they are written once."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.unavailable = True
    harness.cluster.scale(deployment, 4)
    await harness.step(times=3)
    harness.cluster.unavailable = False
    await harness.step(times=20)
    assert [f"announce {WORKLOAD_UID} 3"] == harness.calls()
    assert ["Deployment/serve-1 ScaleUp: 3 replicas are expected: they fork from 2 seeds"] == harness.events()


async def test_events_of_deleted_workloads_are_dropped(harness: ControllerHarness) -> None:
    """The namespace may be deleted too and would never accept the Event."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.unavailable = True
    harness.cluster.scale(deployment, 4)
    await harness.step()
    harness.cluster.remove_workload(deployment)
    await harness.step()
    failed = harness.metric("failed_actions_total", action="event")
    await harness.step(times=200)
    assert failed == harness.metric("failed_actions_total", action="event")


async def test_created_pods_do_not_change_the_announcement(harness: ControllerHarness) -> None:
    """The Pods of an announced scale-up are the announced replicas."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 4)
    await harness.reconcile()
    harness.calls()
    harness.cluster.create(deployment, 2)
    await harness.step()
    harness.cluster.create(deployment)
    await harness.step()
    assert [] == harness.calls()


async def test_arrivals_are_counted_down(harness: ControllerHarness) -> None:
    """The planner counts them itself; the controller only withdraws the scale-up at the end."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 4)
    await harness.reconcile()
    pods = harness.cluster.create(deployment, 3)
    harness.calls(), harness.events()
    event_log: list[list[str]] = []
    for pod in pods:
        harness.planner_api.request_fork(pod)
        await harness.step(times=2)
        event_log.append(harness.calls())
    assert [[], [], [f"withdraw {WORKLOAD_UID}"]] == event_log
    assert [] == [event for event in harness.events() if "ScaleUp" in event]


async def test_a_bound_pod_announces_its_node(harness: ControllerHarness) -> None:
    """At once, without a poll and without a second Event; its fork request announces nothing."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 3)
    await harness.reconcile()
    first, second = harness.cluster.create(deployment, 2)
    await harness.step()
    harness.calls(), harness.events()
    harness.cluster.change(first, node="node-7")
    await harness.reconcile()
    assert [f"announce {WORKLOAD_UID} 2"] == harness.calls()
    assert ("node-7",) == harness.planner_api.scaleup_views[WORKLOAD_UID].scaleup.hosts
    assert [] == [event for event in harness.events() if "ScaleUp" in event]
    harness.planner_api.request_fork(first)
    await harness.step(times=3)
    assert [] == harness.calls()
    harness.cluster.change(second, node="node-8")
    await harness.reconcile()
    assert [f"announce {WORKLOAD_UID} 1"] == harness.calls()
    assert ("node-8",) == harness.planner_api.scaleup_views[WORKLOAD_UID].scaleup.hosts


async def test_a_replacement_on_another_node_is_announced(harness: ControllerHarness) -> None:
    """The node of the deleted Pod is no longer announced."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 2)
    await harness.reconcile()
    (pod,) = harness.cluster.create(deployment, 1, node="node-7")
    await harness.step()
    harness.cluster.delete(pod)
    harness.cluster.create(deployment, 1, node="node-8")
    await harness.reconcile()
    assert ("node-8",) == harness.planner_api.scaleup_views[WORKLOAD_UID].scaleup.hosts
    assert 1 == harness.planner_api.scaleup_views[WORKLOAD_UID].scaleup.replicas


async def test_an_unreachable_planner_gets_the_nodes_later(harness: ControllerHarness) -> None:
    """Nothing is announced during the outage; afterwards the node is."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 2)
    await harness.reconcile()
    harness.planner_api.unavailable = True
    await harness.step()
    harness.calls()
    harness.cluster.create(deployment, 1, node="node-7")
    await harness.reconcile()
    assert [] == harness.calls()
    harness.planner_api.unavailable = False
    await harness.step()
    assert ("node-7",) == harness.planner_api.scaleup_views[WORKLOAD_UID].scaleup.hosts


async def test_a_fork_opens_the_gate_and_gets_an_event_and_a_deletion_cost(harness: ControllerHarness) -> None:
    """The gate shows the progress and opens; the Event names a source; then the Pod gets a deletion cost."""
    deployment, seeds = await deploy_seeds(harness, 2)
    harness.cluster.scale(deployment, 3)
    (pod,) = harness.cluster.create(deployment)
    await harness.step()
    harness.planner_api.request_fork(pod, *seeds)
    await harness.step(6)
    harness.planner_api.receive_chunks(pod, 43, *seeds)
    await harness.step(6)
    harness.planner_api.finish_fork(pod, *seeds)
    await harness.step(0.4)
    assert [
        f"{pod.name} False Waiting: no rank has requested its weights yet",
        f"{pod.name} False Receiving: receiving: 0 % of 15.2 GB",
        f"{pod.name} False Receiving: receiving: 43 % of 15.2 GB",
        f"{pod.name} True Forked: 1 rank is complete: 15.2 GB",
    ] == harness.conditions()
    first = min(seeds, key=lambda seed: seed.name)
    assert f"Pod/{pod.name} Forked: forked 15.2 GB from {first.name} in 12.0 s, 2 sources" in harness.events()
    await harness.step(10, times=3)
    read, idle = [f"{seed.name} 87002" for seed in seeds], [f"{seed.name} 87001" for seed in seeds]
    assert [*read, f"{pod.name} 87001", *idle] == harness.costs()
    assert [] == harness.events()


async def test_a_restarted_controller_continues(harness: ControllerHarness) -> None:
    """During a scale-up it announces and reports nothing twice, and keeps counting."""
    deployment, seeds = await deploy_seeds(harness, 2)
    harness.cluster.scale(deployment, 5)
    await harness.reconcile()
    pods = harness.cluster.create(deployment, 3)
    for pod in pods[:2]:
        harness.planner_api.request_fork(pod, *seeds)
    await harness.step(12)
    harness.planner_api.finish_fork(pods[0], *seeds)
    await harness.step()
    harness.calls(), harness.events(), harness.costs()
    harness.controller = harness.new_leader()
    await harness.step(times=2)
    assert [] == harness.calls()
    assert [] == harness.events()
    assert [] == harness.costs()
    harness.planner_api.request_fork(pods[2], *seeds)
    harness.planner_api.finish_fork(pods[1], *seeds)
    await harness.step(times=2)
    assert [f"withdraw {WORKLOAD_UID}"] == harness.calls()
    assert [f"Pod/{pods[1].name} Forked"] == [event.partition(":")[0] for event in harness.events()]


async def test_leadership_moves_to_another_replica(harness: ControllerHarness) -> None:
    """The previous leader does nothing; the new one does everything once."""
    deployment, _ = await deploy_seeds(harness)
    before = harness.controller
    harness.controller = harness.new_leader()
    harness.cluster.scale(deployment, 2)
    await before.refresh()
    await before.reconcile(lambda: False)
    assert [] == harness.calls()
    await harness.step()
    assert [f"announce {WORKLOAD_UID} 1"] == harness.calls()


async def test_a_scale_down_withdraws_the_scale_up(harness: ControllerHarness) -> None:
    """Scaled up, and down again before any Pod existed."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 4)
    await harness.reconcile()
    harness.cluster.scale(deployment, 1)
    await harness.reconcile()
    await harness.step()
    assert [f"announce {WORKLOAD_UID} 3", f"withdraw {WORKLOAD_UID}"] == harness.calls()


async def test_scale_ups_of_deleted_workloads_are_withdrawn(harness: ControllerHarness) -> None:
    """Also by a controller that restarted in between."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 4)
    await harness.reconcile()
    harness.calls()
    harness.controller = harness.new_leader()
    harness.cluster.remove_workload(deployment)
    await harness.step(times=2)
    assert f"withdraw {WORKLOAD_UID}" in harness.calls()


async def test_replicas_that_never_appear_are_not_expected_forever(harness: ControllerHarness) -> None:
    """After `scaleup_ttl_s` nothing is announced, although they are still wanted, until the workload grows."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 3)
    await harness.reconcile()
    harness.calls()
    await harness.step(harness.settings.scaleup_ttl_s - 1)
    assert [] == harness.calls()
    await harness.step(times=2)
    assert [f"withdraw {WORKLOAD_UID}"] == harness.calls()
    harness.cluster.scale(deployment, 4)
    await harness.reconcile()
    assert [f"announce {WORKLOAD_UID} 3"] == harness.calls()


async def test_a_planner_without_its_state_gets_the_announcement_again(harness: ControllerHarness) -> None:
    """A scale-up that it does not know is announced again for the remaining time, without another Event."""
    deployment, pods = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 4)
    await harness.reconcile()
    harness.calls(), harness.events()
    harness.planner_api.restart()
    harness.planner_api.become_seed(pods[0])
    await harness.step(100)
    assert [f"announce {WORKLOAD_UID} 3"] == harness.calls()
    assert harness.settings.scaleup_ttl_s - 100 == harness.planner_api.scaleup_views[WORKLOAD_UID].scaleup.expires_in_s
    assert [] == harness.events()


async def test_a_restarted_planner_causes_no_scale_up(harness: ControllerHarness) -> None:
    """It knows no instance for a moment: nothing is announced, written or reported because of that."""
    deployment, seeds = await deploy_seeds(harness, 2)
    harness.cluster.scale(deployment, 3)
    (pod,) = harness.cluster.create(deployment)
    await harness.step()
    harness.planner_api.request_fork(pod, *seeds)
    await harness.step(10, times=2)
    harness.calls(), harness.events(), harness.conditions(), harness.costs()
    harness.planner_api.restart()
    await harness.step()
    assert [] == harness.calls()
    assert [] == harness.events()
    assert [] == harness.costs()
    for seed in seeds:
        harness.planner_api.become_seed(seed)
    harness.planner_api.request_fork(pod, *seeds)
    await harness.step(times=10)
    assert [] == harness.calls()
    assert [] == harness.events()
    assert [] == harness.costs()


async def test_a_decrease_is_announced_after_two_polls(harness: ControllerHarness) -> None:
    """A difference in only one poll is ignored, because the planner's lists are not fetched atomically."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 4)
    await harness.reconcile()
    harness.cluster.scale(deployment, 3)
    await harness.reconcile()
    harness.cluster.scale(deployment, 4)
    await harness.step()
    assert [f"announce {WORKLOAD_UID} 3"] == harness.calls()
    harness.cluster.scale(deployment, 3)
    await harness.reconcile()
    await harness.reconcile()
    assert [] == harness.calls()
    await harness.step()
    assert [f"announce {WORKLOAD_UID} 2"] == harness.calls()
    assert 1 == len(harness.events())


async def test_unschedulable_pods_are_not_expected(harness: ControllerHarness) -> None:
    """Others do not wait for them; once they get a node, they are announced."""
    deployment, _ = await deploy_seeds(harness)
    harness.cluster.scale(deployment, 4)
    await harness.reconcile()
    pods = harness.cluster.create(deployment, 3)
    for pod in pods[1:]:
        harness.cluster.change(pod, conditions={"PodScheduled": False})
    await harness.step(times=2)
    assert [f"announce {WORKLOAD_UID} 3", f"announce {WORKLOAD_UID} 1"] == harness.calls()
    harness.planner_api.request_fork(pods[0])
    await harness.step(harness.settings.scaleup_ttl_s, times=2)
    assert [f"withdraw {WORKLOAD_UID}"] == harness.calls()
    for pod in pods[1:]:
        harness.cluster.change(pod, node="node-2", conditions={"PodScheduled": True}, scheduled_at=harness.clock.now)
    await harness.step(times=2)
    assert [f"announce {WORKLOAD_UID} 2"] == harness.calls()
    assert 1 == sum("ScaleUp" in event for event in harness.events())
