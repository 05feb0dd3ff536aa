from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import PodSeen
from planner.hooks.kubernetes.controller.keeping import IDLE, LAST, PAUSE_S, READ, decide
from planner.hooks.kubernetes.controller.scene import Look, scene
from rfork.wire import ForkView, InstanceView, Rank
from tests.unit.hooks.kubernetes.fake_cluster import pod, uid, workload
from tests.unit.hooks.kubernetes.fake_fleet import fork, instance, instance_id

NOW: Final = 1000.0
SERVE = workload(1, 9)
LEFT, RIGHT = Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)
OTHER = "2" * 32


def one(number: int, cost: str | None = None, **changes: object) -> PodSeen:
    """A Pod of the Deployment that costs so much."""
    annotations = {names.INJECTED: "1"} | ({names.DELETION_COST: cost} if cost is not None else {})
    return replace(pod(number, SERVE, annotations=annotations), **changes)  # type: ignore[arg-type]


def costs(
    pods: Sequence[PodSeen], instances: Sequence[InstanceView], forks: Sequence[ForkView] = ()
) -> dict[str, str | None]:
    """What is changed, by the number of the Pod."""
    seen = scene(
        NOW, {each.uid: each for each in pods}, {SERVE.uid: SERVE}, Look(NOW, tuple(instances), tuple(forks))
    )
    return {cost.pod.name: cost.value for cost in decide(seen, {})}


SEEDS = [instance(uid(number)) for number in (5, 6)]


@pytest.mark.parametrize(
    ("pods", "instances", "forks", "expected"),
    [
        pytest.param([one(5), one(6)], SEEDS, [], {"pod-5": IDLE, "pod-6": IDLE}, id="two idle seeds"),
        pytest.param([one(5, IDLE), one(6)], [], [], {}, id="the planner knows nobody yet"),
        pytest.param([one(5, IDLE), one(6, IDLE)], SEEDS, [], {}, id="as they are"),
        pytest.param([one(5)], SEEDS[:1], [], {"pod-5": LAST}, id="the last seed"),
        pytest.param([one(5)], SEEDS, [], {"pod-5": IDLE}, id="another one, which is nobody's Pod"),
        pytest.param(
            [one(5), one(6)], [SEEDS[0], instance(uid(6), weights_id=OTHER)], [],
            {"pod-5": LAST, "pod-6": LAST}, id="each the last that holds its weights",
        ),
        pytest.param(
            [one(5), one(6), one(7)],
            [*(instance(uid(n), version="v1") for n in (5, 6)), instance(uid(7), version="v2")], [],
            {"pod-5": IDLE, "pod-6": IDLE, "pod-7": LAST}, id="the last of its version, with equal weights",
        ),
        pytest.param(
            [one(5), one(6)], [SEEDS[0], instance(uid(6), quarantined="it lied")], [], {"pod-5": LAST},
            id="one that nobody reads from is none",
        ),
        pytest.param(
            [one(5, IDLE), one(6, IDLE), one(7)], [*SEEDS, instance(uid(7), "loading", chunks=40)],
            [fork(uid(7), plan=(instance_id(uid(5)),), chunks=40)], {"pod-5": READ}, id="one is read from",
        ),
        pytest.param(
            [one(5, READ), one(6, IDLE), one(7)], [*SEEDS, instance(uid(7))],
            [fork(uid(7), "forked", plan=(instance_id(uid(5)),))], {"pod-5": IDLE, "pod-7": IDLE},
            id="it was read from",
        ),
        pytest.param(
            [one(5), one(6)], [instance(uid(5), readers=("f",)), SEEDS[1]], [],
            {"pod-5": READ, "pod-6": IDLE}, id="it says that it is read from",
        ),
        pytest.param([one(5)], [instance(uid(5), "loading", chunks=99)], [], {}, id="not whole"),
        pytest.param(
            [one(5, IDLE), one(6, IDLE)], [SEEDS[0], instance(uid(6), "draining")], [],
            {"pod-5": LAST, "pod-6": None}, id="it leaves: as cheap as any",
        ),
        pytest.param([one(5, "7"), one(6)], SEEDS, [], {"pod-6": IDLE}, id="the user's own cost"),
        pytest.param(
            [one(5), one(6)], [instance(uid(5), rank=LEFT), instance(uid(6), rank=LEFT)], [], {},
            id="a rank is missing",
        ),
        pytest.param(
            [one(5), one(6)],
            [
                instance(uid(5), rank=LEFT), instance(uid(5), rank=RIGHT), instance(uid(6), rank=LEFT),
                instance(uid(6), "loading", rank=RIGHT, chunks=3),
            ],
            [], {"pod-5": LAST}, id="the last of one rank",
        ),
        pytest.param([one(5, deleting=True), one(6)], SEEDS, [], {"pod-6": IDLE}, id="one that goes already"),
        pytest.param(
            [pod(5, workload(1, kind="StatefulSet")), pod(6)], SEEDS, [], {}, id="no ReplicaSet's Pods",
        ),
    ],
)  # fmt: skip
def test_what_pods_cost(
    pods: Sequence[PodSeen],
    instances: Sequence[InstanceView],
    forks: Sequence[ForkView],
    expected: dict[str, str | None],
) -> None:
    """First those go that are not whole, then idle seeds, then those with readers, then the last seeds."""
    assert expected == costs(pods, instances, forks)


def test_the_order_of_costs() -> None:
    """As Kubernetes compares them: as numbers."""
    assert 0 < int(IDLE) < int(READ) < int(LAST)


@pytest.mark.parametrize(("changed", "expected"), [(NOW - PAUSE_S + 1, 0), (NOW - PAUSE_S, 1)])
def test_a_cost_changes_rarely(changed: float, expected: int) -> None:
    """No Pod is written to twice within ten seconds."""
    seen = scene(NOW, {uid(5): one(5)}, {}, Look(NOW, tuple(SEEDS)))
    assert expected == len(decide(seen, {uid(5): changed}))


def test_nothing_changes_while_the_planner_is_away() -> None:
    """What it told last may not hold any more."""
    seen = scene(NOW, {uid(5): one(5)}, {}, Look(NOW, tuple(SEEDS)), away_since=NOW)
    assert () == decide(seen, {})
