"""Several versions of a model among the Pods of one workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.events import find_mixes, mix_start_times
from planner.integrations.kubernetes.controller.observed_state import PlannerSnapshot, observe
from rfork.schema import InstanceInfo, Rank
from tests.unit.planner.integrations.kubernetes.controller.controller_harness import ControllerHarness
from tests.unit.planner.integrations.kubernetes.controller.serving_workload import WORKLOAD_UID, deploy_seeds
from tests.unit.planner.integrations.kubernetes.fake_cluster import MODEL, pod, uid, workload
from tests.unit.planner.integrations.kubernetes.fake_planner_api import instance

NOW: Final = 1000.0
DEPLOYMENT, OTHER = workload(1, 3), workload(2, 3)
PODS = [pod(number, DEPLOYMENT) for number in (5, 6, 7)]


def of(number: int, version: str | None, **changes: object) -> InstanceInfo:
    return instance(uid(number), version=version, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pods", "instances", "expected"),
    [
        pytest.param(PODS, [of(5, "v1"), of(6, "v1")], {}, id="one version"),
        pytest.param(
            PODS, [of(5, "v1"), of(6, "v1"), of(7, "v2")], {uid(1): {"v1": 2, "v2": 1}}, id="two versions",
        ),
        pytest.param(
            PODS, [of(5, "v1"), of(6, "v2", state="loading", chunks=0)], {uid(1): {"v1": 1, "v2": 1}},
            id="a new Pod that loads",
        ),
        pytest.param(PODS, [of(5, "v1"), of(6, None)], {}, id="a version that is not determined yet"),
        pytest.param(
            PODS, [of(5, "v1"), of(6, "unnamed:a"), of(7, "update:a:1")], {}, id="versions of one replica",
        ),
        pytest.param(
            [pod(5, DEPLOYMENT), pod(6, OTHER)], [of(5, "v1"), of(6, "v2")], {}, id="two workloads: a canary",
        ),
        pytest.param(
            [pod(5, DEPLOYMENT), pod(6, DEPLOYMENT, deleting=True)], [of(5, "v1"), of(6, "v2")], {},
            id="the old one is terminating",
        ),
        pytest.param([pod(5), pod(6)], [of(5, "v1"), of(6, "v2")], {}, id="Pods without a workload"),
        pytest.param(
            PODS, [of(5, "v1"), of(5, "d1", rank=Rank(role="speculative"))], {}, id="a main and a speculative model",
        ),
        pytest.param(
            PODS, [of(5, "v1", model="a"), of(5, "v2", model="b")], {}, id="two models",
        ),
    ],
)  # fmt: skip
def test_workloads_with_several_versions_are_found(
    pods: Sequence[ObservedPod], instances: Sequence[InstanceInfo], expected: dict[str, dict[str, int]]
) -> None:
    """Counts the versions of one model among the living Pods of one workload."""
    workloads = {one.uid: one for one in (DEPLOYMENT, OTHER)}
    snapshot = PlannerSnapshot(NOW, tuple(instances))
    found = find_mixes(observe(NOW, {one.uid: one for one in pods}, workloads, snapshot))
    assert expected == {name: dict(mix.pods) for name, mix in found.items()}


def test_a_mix_starts_when_it_is_first_observed() -> None:
    """One that ended and comes back starts again."""
    first = mix_start_times({"a", "b"}, {}, 1.0)
    assert {"a": 1.0, "b": 1.0} == first
    assert {"a": 1.0} == mix_start_times({"a"}, first, 2.0)
    assert {"b": 3.0} == mix_start_times({"b"}, mix_start_times({"a"}, first, 2.0), 3.0)


async def _mixed(harness: ControllerHarness) -> None:
    """Set another version for one of two Pods."""
    _, pods = await deploy_seeds(harness, 2)
    for number, one in enumerate(pods):
        harness.planner_api.put_instance(instance(one.uid, version=f"v{number}"))


async def test_a_rollout_is_not_reported(harness: ControllerHarness) -> None:
    """Two versions for less than an hour are normal."""
    await _mixed(harness)
    await harness.step(2)
    await harness.step(3599)
    assert [] == harness.events()
    assert 0 == harness.metric("mixed_versions")


async def test_a_lasting_mix_is_reported_once(harness: ControllerHarness) -> None:
    """A Warning on the workload names the versions, and the metric counts the workload."""
    await _mixed(harness)
    await harness.step(2)
    await harness.step(3600, times=3)
    expected = f"2 versions of {MODEL} for more than 1 h: 1 Pod has v0, 1 Pod has v1: finish the rollout or roll back"
    assert [f"Deployment/serve-1 MixedVersions: {expected}"] == harness.events()
    assert 1 == harness.metric("mixed_versions")


async def test_a_mix_that_ends_resets_the_metric(harness: ControllerHarness) -> None:
    """The metric returns to 0."""
    await _mixed(harness)
    await harness.step(2)
    await harness.step(3600)
    for one in list(harness.cluster.pod_objects.values()):
        harness.planner_api.put_instance(instance(one.uid, version="v1"))
    await harness.step(2)
    assert 0 == harness.metric("mixed_versions")


async def test_a_stated_version_is_announced(harness: ControllerHarness) -> None:
    """The Event names it, too."""
    deployment = harness.cluster.deploy(1, 0, template_annotations={names.VERSION: "v2"})
    await harness.step()
    harness.cluster.scale(deployment, 2)
    await harness.reconcile()
    assert ["v2"] == [view.scaleup.version for view in harness.planner_api.scaleup_views.values()]
    assert all(name.startswith(WORKLOAD_UID) for name in harness.planner_api.scaleup_views)
    assert [
        "Deployment/serve-1 ScaleUp: 2 replicas of version v2 are expected: they fork from 2 seeds"
    ] == harness.events()
