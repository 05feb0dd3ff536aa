"""Deletion costs: which Pod a scale-down removes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.observed_state import PlannerSnapshot, observe
from planner.integrations.kubernetes.controller.scale_down import (
    BEING_READ_COST,
    IDLE_COST,
    LAST_SEED_COST,
    UPDATE_INTERVAL_S,
    deletion_costs,
)
from rfork.schema import ForkInfo, InstanceInfo, Rank
from tests.unit.planner.integrations.kubernetes.fake_cluster import pod, uid, workload
from tests.unit.planner.integrations.kubernetes.fake_planner_api import fork, instance, instance_id

NOW: Final = 1000.0
WORKLOAD = workload(1, 9)
LEFT, RIGHT = Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)
OTHER = "2" * 32


def workload_pod(number: int, cost: str | None = None, **changes: object) -> ObservedPod:
    """Return a Pod of the Deployment with this cost."""
    annotations = {names.INJECTED: "1"} | ({names.DELETION_COST: cost} if cost is not None else {})
    return replace(pod(number, WORKLOAD, annotations=annotations), **changes)  # type: ignore[arg-type]


def costs(
    pods: Sequence[ObservedPod], instances: Sequence[InstanceInfo], forks: Sequence[ForkInfo] = ()
) -> dict[str, str | None]:
    """Return the changes by the number of the Pod."""
    seen = observe(
        NOW,
        {each.uid: each for each in pods},
        {WORKLOAD.uid: WORKLOAD},
        PlannerSnapshot(NOW, tuple(instances), tuple(forks)),
    )
    return {cost.pod.name: cost.value for cost in deletion_costs(seen, {})}


SEEDS = [instance(uid(number)) for number in (5, 6)]


@pytest.mark.parametrize(
    ("pods", "instances", "forks", "expected"),
    [
        pytest.param(
            [workload_pod(5), workload_pod(6)], SEEDS, [], {"pod-5": IDLE_COST, "pod-6": IDLE_COST},
            id="two idle seeds",
        ),
        pytest.param(
            [workload_pod(5)], [SEEDS[0], instance("held", holder="holder-1")], [], {"pod-5": LAST_SEED_COST},
            id="the only seed, and a holder that may evict the image",
        ),
        pytest.param([workload_pod(5, IDLE_COST), workload_pod(6)], [], [], {}, id="the planner knows no instance yet"),
        pytest.param([workload_pod(5, IDLE_COST), workload_pod(6, IDLE_COST)], SEEDS, [], {}, id="unchanged"),
        pytest.param([workload_pod(5)], SEEDS[:1], [], {"pod-5": LAST_SEED_COST}, id="the last seed"),
        pytest.param([workload_pod(5)], SEEDS, [], {"pod-5": IDLE_COST}, id="another seed without a Pod"),
        pytest.param(
            [workload_pod(5), workload_pod(6)], [SEEDS[0], instance(uid(6), weights_id=OTHER)], [],
            {"pod-5": LAST_SEED_COST, "pod-6": LAST_SEED_COST}, id="each is the last with its weights",
        ),
        pytest.param(
            [workload_pod(5), workload_pod(6), workload_pod(7)],
            [*(instance(uid(n), version="v1") for n in (5, 6)), instance(uid(7), version="v2")], [],
            {"pod-5": IDLE_COST, "pod-6": IDLE_COST, "pod-7": LAST_SEED_COST},
            id="the last of its version, with equal weights",
        ),
        pytest.param(
            [workload_pod(5), workload_pod(6)], [SEEDS[0], instance(uid(6), quarantined="corrupt data")], [],
            {"pod-5": LAST_SEED_COST},
            id="a quarantined seed does not count",
        ),
        pytest.param(
            [workload_pod(5, IDLE_COST), workload_pod(6, IDLE_COST), workload_pod(7)],
            [*SEEDS, instance(uid(7), "loading", chunks=40)],
            [fork(uid(7), plan=(instance_id(uid(5)),), chunks=40)], {"pod-5": BEING_READ_COST}, id="one has a reader",
        ),
        pytest.param(
            [workload_pod(5, BEING_READ_COST), workload_pod(6, IDLE_COST), workload_pod(7)], [*SEEDS, instance(uid(7))],
            [fork(uid(7), "forked", plan=(instance_id(uid(5)),))], {"pod-5": IDLE_COST, "pod-7": IDLE_COST},
            id="it had a reader",
        ),
        pytest.param(
            [workload_pod(5), workload_pod(6)], [instance(uid(5), readers=("f",)), SEEDS[1]], [],
            {"pod-5": BEING_READ_COST, "pod-6": IDLE_COST}, id="it reports a reader",
        ),
        pytest.param([workload_pod(5)], [instance(uid(5), "loading", chunks=99)], [], {}, id="incomplete"),
        pytest.param(
            [workload_pod(5, IDLE_COST), workload_pod(6, IDLE_COST)], [SEEDS[0], instance(uid(6), "draining")], [],
            {"pod-5": LAST_SEED_COST, "pod-6": None}, id="terminating: annotation removed",
        ),
        pytest.param(
            [workload_pod(5, "7"), workload_pod(6)], SEEDS, [], {"pod-6": IDLE_COST},
            id="a cost set by the user",
        ),
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
        pytest.param(
            [workload_pod(5, deleting=True), workload_pod(6)], SEEDS, [], {"pod-6": IDLE_COST},
            id="already being deleted",
        ),
        pytest.param(
            [pod(5, workload(1, kind="StatefulSet")), pod(6)], SEEDS, [], {}, id="no ReplicaSet's Pods",
        ),
    ],
)  # fmt: skip
def test_less_useful_pods_are_deleted_first(
    pods: Sequence[ObservedPod],
    instances: Sequence[InstanceInfo],
    forks: Sequence[ForkInfo],
    expected: dict[str, str | None],
) -> None:
    """Deleted first: incomplete Pods, then idle seeds, then seeds with readers, then the last seeds."""
    assert expected == costs(pods, instances, forks)


def test_costs_are_ordered() -> None:
    """Kubernetes compares them as numbers."""
    assert 0 < int(IDLE_COST) < int(BEING_READ_COST) < int(LAST_SEED_COST)


@pytest.mark.parametrize(("changed", "expected"), [(NOW - UPDATE_INTERVAL_S + 1, 0), (NOW - UPDATE_INTERVAL_S, 1)])
def test_costs_change_at_most_every_ten_seconds(changed: float, expected: int) -> None:
    """Writes to one Pod are rate-limited."""
    seen = observe(NOW, {uid(5): workload_pod(5)}, {}, PlannerSnapshot(NOW, tuple(SEEDS)))
    assert expected == len(deletion_costs(seen, {uid(5): changed}))


def test_costs_do_not_change_while_the_planner_is_down() -> None:
    """Its last lists may be outdated."""
    seen = observe(NOW, {uid(5): workload_pod(5)}, {}, PlannerSnapshot(NOW, tuple(SEEDS)), planner_down_since=NOW)
    assert () == deletion_costs(seen, {})
