from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from planner.hooks.kubernetes.cluster import PodSeen
from planner.hooks.kubernetes.controller.leaving import decide
from planner.hooks.kubernetes.controller.scene import Look, scene
from rfork.wire import InstanceView, Placement, Rank
from tests.unit.hooks.kubernetes.fake_cluster import pod, uid
from tests.unit.hooks.kubernetes.fake_fleet import instance

NOW: Final = 1000.0
RUNS = pod(5, phase="Running")
BARE = Placement(host="metal-1")
RANKS = [Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)]


@pytest.mark.parametrize(
    ("pods", "gone", "instances", "expected"),
    [
        pytest.param([RUNS], [], [instance(uid(5))], 0, id="it runs"),
        pytest.param([RUNS], [], [instance(uid(5), age_s=500.0)], 0, id="it runs, and is silent"),
        pytest.param([pod(5, deleting=True)], [], [instance(uid(5))], 0, id="it leaves"),
        pytest.param([pod(5, phase="Succeeded")], [], [instance(uid(5))], 1, id="it has ended"),
        pytest.param([pod(5, phase="Failed")], [], [instance(uid(5))], 1, id="it was evicted"),
        pytest.param([], [pod(5)], [instance(uid(5), rank=rank) for rank in RANKS], 2, id="it is gone"),
        pytest.param([RUNS], [RUNS], [instance(uid(5))], 0, id="it was gone, and is back"),
        pytest.param([RUNS], [], [instance(uid(5)), instance(uid(6), age_s=10.0)], 0, id="a stranger"),
        pytest.param([RUNS], [], [instance(uid(5)), instance(uid(6), age_s=10.1)], 1, id="a silent stranger"),
        pytest.param(
            [RUNS], [], [instance(uid(5), age_s=6.0), instance(uid(6), age_s=11.9)], 0,
            id="heartbeats are slow here",
        ),
        pytest.param([], [], [instance(uid(6), age_s=500.0)], 0, id="nobody to compare with"),
        pytest.param(
            [RUNS], [], [instance(uid(5)), instance(uid(6), age_s=500.0, placement=BARE)], 0, id="no Pod's",
        ),
        pytest.param(
            [RUNS], [], [instance(uid(5)), instance("somebody", age_s=500.0)], 0, id="its name is no UID",
        ),
    ],
)  # fmt: skip
def test_who_is_removed(
    pods: Sequence[PodSeen], gone: Sequence[PodSeen], instances: Sequence[InstanceView], expected: int
) -> None:
    """Instances of Pods that were seen and are over; of others only who is silent for far too long."""
    seen = scene(
        NOW,
        {one.uid: one for one in pods},
        {},
        Look(NOW, tuple(instances)),
        gone={one.uid: one for one in gone},
    )
    assert expected == len(decide(seen, set()))


def test_each_is_removed_once() -> None:
    """One that is there again after it was removed lives."""
    view = instance(uid(5))
    seen = scene(NOW, {}, {}, Look(NOW, (view,)), gone={uid(5): RUNS})
    assert (view.report.instance_id,) == decide(seen, set())
    assert () == decide(seen, {view.report.instance_id})


def test_nobody_is_removed_while_the_planner_is_away() -> None:
    """It could not be asked to."""
    seen = scene(NOW, {}, {}, Look(NOW, (instance(uid(5)),)), gone={uid(5): RUNS}, away_since=NOW)
    assert () == decide(seen, set())
