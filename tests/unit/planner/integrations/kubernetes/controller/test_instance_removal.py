"""Removal of the instances of finished Pods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.observed_state import PlannerSnapshot, observe
from planner.integrations.kubernetes.controller.scale_down import instances_to_remove
from rfork.schema import InstanceInfo, Rank
from tests.unit.planner.integrations.kubernetes.fake_cluster import pod, uid
from tests.unit.planner.integrations.kubernetes.fake_planner_api import instance

NOW: Final = 1000.0
RUNNING_POD = pod(5, phase="Running")
DELETED_POD = pod(5, deleting=True)
RANKS = [Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)]


@pytest.mark.parametrize(
    ("pods", "deleted_pods", "instances", "expected"),
    [
        pytest.param([RUNNING_POD], [], [instance(uid(5))], 0, id="running"),
        pytest.param([RUNNING_POD], [], [instance(uid(5), age_s=500.0)], 0, id="running and silent"),
        pytest.param([pod(5, deleting=True)], [], [instance(uid(5))], 0, id="terminating"),
        pytest.param([pod(5, phase="Succeeded")], [], [instance(uid(5))], 1, id="finished"),
        pytest.param([pod(5, phase="Failed")], [], [instance(uid(5))], 1, id="evicted"),
        pytest.param([], [DELETED_POD], [instance(uid(5), rank=rank) for rank in RANKS], 2, id="deleted"),
        pytest.param([], [pod(5, phase="Failed")], [instance(uid(5))], 1, id="finished and deleted"),
        pytest.param([], [RUNNING_POD], [instance(uid(5), age_s=7.0)], 0, id="disappeared, sends heartbeats"),
        pytest.param([], [RUNNING_POD], [instance(uid(5), age_s=7.1)], 1, id="disappeared, silent"),
        pytest.param([RUNNING_POD], [RUNNING_POD], [instance(uid(5))], 0, id="disappeared and came back"),
        pytest.param([RUNNING_POD], [], [instance(uid(5)), instance(uid(6), age_s=19.0)], 0, id="unknown Pod"),
    ],
)  # fmt: skip
def test_instances_of_finished_pods_are_removed(
    pods: Sequence[ObservedPod],
    deleted_pods: Sequence[ObservedPod],
    instances: Sequence[InstanceInfo],
    expected: int,
) -> None:
    """Instances of finished Pods are removed; of Pods that may run, only silent ones; of others, none."""
    seen = observe(
        NOW,
        {one.uid: one for one in pods},
        {},
        PlannerSnapshot(NOW, tuple(instances)),
        deleted={one.uid: one for one in deleted_pods},
    )
    assert expected == len(instances_to_remove(seen, set()))


def test_each_is_removed_once() -> None:
    """An instance that reappears after its removal is alive."""
    view = instance(uid(5))
    seen = observe(NOW, {}, {}, PlannerSnapshot(NOW, (view,)), deleted={uid(5): DELETED_POD})
    assert (view.report.instance_id,) == instances_to_remove(seen, set())
    assert () == instances_to_remove(seen, {view.report.instance_id})


@pytest.mark.parametrize(("age_s", "expected"), [(1.0, 0), (7.0, 0), (7.1, 1)])
@pytest.mark.parametrize("ended", [pod(5, phase="Failed"), None])
def test_pods_finished_before_the_lead_are_removed_once_silent(
    ended: ObservedPod | None, age_s: float, expected: int
) -> None:
    """The previous leader removed their instances: any that send heartbeats are alive."""
    pods = {uid(5): ended} if ended is not None else {}
    seen = observe(NOW, pods, {}, PlannerSnapshot(NOW, (instance(uid(5), age_s=age_s),)), deleted={uid(5): DELETED_POD})
    assert expected == len(instances_to_remove(seen, set(), {uid(5)}))


def test_nothing_is_removed_while_the_planner_is_down() -> None:
    """The request would fail."""
    seen = observe(
        NOW,
        {},
        {},
        PlannerSnapshot(NOW, (instance(uid(5)),)),
        deleted={uid(5): DELETED_POD},
        planner_down_since=NOW,
    )
    assert () == instances_to_remove(seen, set())
