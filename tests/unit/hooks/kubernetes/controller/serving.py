"""A workload whose Pods serve."""

from __future__ import annotations

from planner.hooks.kubernetes.cluster import PodSeen, WorkloadSeen
from tests.unit.hooks.kubernetes.controller.stage import Stage
from tests.unit.hooks.kubernetes.fake_cluster import uid

SERVE = uid(1)


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
