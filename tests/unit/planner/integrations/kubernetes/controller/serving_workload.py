"""A workload whose Pods serve."""

from __future__ import annotations

from planner.integrations.kubernetes.cluster import ObservedPod, ObservedWorkload
from tests.unit.planner.integrations.kubernetes.controller.controller_harness import ControllerHarness
from tests.unit.planner.integrations.kubernetes.fake_cluster import uid

WORKLOAD_UID = uid(1)


async def deploy_seeds(harness: ControllerHarness, replicas: int = 1) -> tuple[ObservedWorkload, list[ObservedPod]]:
    """Create a Deployment whose Pods are seeds, and drop the Events and calls that this caused."""
    deployment = harness.cluster.deploy(1, replicas)
    pods = harness.cluster.create(deployment, replicas)
    for pod in pods:
        harness.planner_api.become_seed(pod)
        harness.cluster.ready(pod)
    await harness.step(times=2)
    harness.calls(), harness.events(), harness.conditions(), harness.costs()
    return deployment, pods
