from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.observed_state import PlannerSnapshot, observe
from planner.integrations.kubernetes.controller.pod_deletion_cost import (
    BEING_READ_COST,
    IDLE_COST,
    LAST_SEED_COST,
    UPDATE_INTERVAL_S,
    decide,
)
from rfork.schema import ForkInfo, InstanceInfo, Rank
from tests.unit.planner.integrations.kubernetes.fake_cluster import pod, uid, workload
from tests.unit.planner.integrations.kubernetes.fake_planner_api import fork, instance, instance_id

NOW: Final = 1000.0
WORKLOAD = workload(1, 9)
LEFT, RIGHT = Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)
OTHER = "2" * 32


def workload_pod(number: int, cost: str | None = None, **changes: object) -> ObservedPod:
    """A Pod of the Deployment that costs so much."""
    annotations = {names.INJECTED: "1"} | ({names.DELETION_COST: cost} if cost is not None else {})
    return replace(pod(number, WORKLOAD, annotations=annotations), **changes)  # type: ignore[arg-type]


def costs(
    pods: Sequence[ObservedPod], instances: Sequence[InstanceInfo], forks: Sequence[ForkInfo] = ()
) -> dict[str, str | None]:
    """What is changed, by the number of the Pod."""
    seen = observe(
        NOW,
        {each.uid: each for each in pods},
        {WORKLOAD.uid: WORKLOAD},
        PlannerSnapshot(NOW, tuple(instances), tuple(forks)),
    )
    return {cost.pod.name: cost.value for cost in decide(seen, {})}


SEEDS = [instance(uid(number)) for number in (5, 6)]


@pytest.mark.parametrize(
    ("pods", "instances", "forks", "expected"),
    [
        pytest.param([workload_pod(5), workload_pod(6)], SEEDS, [], {"pod-5": IDLE_COST, "pod-6": IDLE_COST}, id="two idle seeds"),
        pytest.param([workload_pod(5, IDLE_COST), workload_pod(6)], [], [], {}, id="the planner knows nobody yet"),
        pytest.param([workload_pod(5, IDLE_COST), workload_pod(6, IDLE_COST)], SEEDS, [], {}, id="as they are"),
        pytest.param([workload_pod(5)], SEEDS[:1], [], {"pod-5": LAST_SEED_COST}, id="the last seed"),
        pytest.param([workload_pod(5)], SEEDS, [], {"pod-5": IDLE_COST}, id="another one, which is nobody's Pod"),
        pytest.param(
            [workload_pod(5), workload_pod(6)], [SEEDS[0], instance(uid(6), weights_id=OTHER)], [],
            {"pod-5": LAST_SEED_COST, "pod-6": LAST_SEED_COST}, id="each the last that holds its weights",
        ),
        pytest.param(
            [workload_pod(5), workload_pod(6), workload_pod(7)],
            [*(instance(uid(n), version="v1") for n in (5, 6)), instance(uid(7), version="v2")], [],
            {"pod-5": IDLE_COST, "pod-6": IDLE_COST, "pod-7": LAST_SEED_COST}, id="the last of its version, with equal weights",
        ),
        pytest.param(
            [workload_pod(5), workload_pod(6)], [SEEDS[0], instance(uid(6), quarantined="it lied")], [], {"pod-5": LAST_SEED_COST},
            id="one that nobody reads from is none",
        ),
        pytest.param(
            [workload_pod(5, IDLE_COST), workload_pod(6, IDLE_COST), workload_pod(7)], [*SEEDS, instance(uid(7), "loading", chunks=40)],
            [fork(uid(7), plan=(instance_id(uid(5)),), chunks=40)], {"pod-5": BEING_READ_COST}, id="one is read from",
        ),
        pytest.param(
            [workload_pod(5, BEING_READ_COST), workload_pod(6, IDLE_COST), workload_pod(7)], [*SEEDS, instance(uid(7))],
            [fork(uid(7), "forked", plan=(instance_id(uid(5)),))], {"pod-5": IDLE_COST, "pod-7": IDLE_COST},
            id="it was read from",
        ),
        pytest.param(
            [workload_pod(5), workload_pod(6)], [instance(uid(5), readers=("f",)), SEEDS[1]], [],
            {"pod-5": BEING_READ_COST, "pod-6": IDLE_COST}, id="it says that it is read from",
        ),
        pytest.param([workload_pod(5)], [instance(uid(5), "loading", chunks=99)], [], {}, id="not whole"),
        pytest.param(
            [workload_pod(5, IDLE_COST), workload_pod(6, IDLE_COST)], [SEEDS[0], instance(uid(6), "draining")], [],
            {"pod-5": LAST_SEED_COST, "pod-6": None}, id="it leaves: as cheap as any",
        ),
        pytest.param([workload_pod(5, "7"), workload_pod(6)], SEEDS, [], {"pod-6": IDLE_COST}, id="the user's own cost"),
        pytest.param(
            [workload_pod(5), workload_pod(6)], [instance(uid(5), rank=LEFT), instance(uid(6), rank=LEFT)], [], {},
            id="a rank is missing",
        ),
        pytest.param(
            [workload_pod(5), workload_pod(6)],
            [
                instance(uid(5), rank=LEFT), instance(uid(5), rank=RIGHT), instance(uid(6), rank=LEFT),
                instance(uid(6), "loading", rank=RIGHT, chunks=3),
            ],
            [], {"pod-5": LAST_SEED_COST}, id="the last of one rank",
        ),
        pytest.param([workload_pod(5, deleting=True), workload_pod(6)], SEEDS, [], {"pod-6": IDLE_COST}, id="one that goes already"),
        pytest.param(
            [pod(5, workload(1, kind="StatefulSet")), pod(6)], SEEDS, [], {}, id="no ReplicaSet's Pods",
        ),
    ],
)  # fmt: skip
def test_what_pods_cost(
    pods: Sequence[ObservedPod],
    instances: Sequence[InstanceInfo],
    forks: Sequence[ForkInfo],
    expected: dict[str, str | None],
) -> None:
    """First those go that are not whole, then idle seeds, then those with readers, then the last seeds."""
    assert expected == costs(pods, instances, forks)


def test_the_order_of_costs() -> None:
    """As Kubernetes compares them: as numbers."""
    assert 0 < int(IDLE_COST) < int(BEING_READ_COST) < int(LAST_SEED_COST)


@pytest.mark.parametrize(("changed", "expected"), [(NOW - UPDATE_INTERVAL_S + 1, 0), (NOW - UPDATE_INTERVAL_S, 1)])
def test_a_cost_changes_rarely(changed: float, expected: int) -> None:
    """No Pod is written to twice within ten seconds."""
    seen = observe(NOW, {uid(5): workload_pod(5)}, {}, PlannerSnapshot(NOW, tuple(SEEDS)))
    assert expected == len(decide(seen, {uid(5): changed}))


def test_nothing_changes_while_the_planner_is_away() -> None:
    """What it told last may not hold any more."""
    seen = observe(NOW, {uid(5): workload_pod(5)}, {}, PlannerSnapshot(NOW, tuple(SEEDS)), planner_down_since=NOW)
    assert () == decide(seen, {})
