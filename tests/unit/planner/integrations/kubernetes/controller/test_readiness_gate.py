"""The readiness gate's condition, and how often it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.observed_state import ObservedState, PlannerSnapshot, observe
from planner.integrations.kubernetes.controller.readiness_gate import (
    GateDecision,
    WrittenCondition,
    decide,
    decide_gate,
)
from rfork.schema import ForkInfo, InstanceInfo, Rank
from tests.unit.planner.integrations.kubernetes.fake_cluster import pod
from tests.unit.planner.integrations.kubernetes.fake_planner_api import fork, instance

NOW: Final = 1000.0
GRACE_S: Final = 10.0
MAX_WAIT_S: Final = 900.0
POD = pod(5)
STARTED = pod(5, phase="Running", containers_ready_at=NOW - 2)
GRACED = pod(5, phase="Running", containers_ready_at=NOW - GRACE_S)
SLOW = pod(5, phase="Running", containers_ready_at=NOW - MAX_WAIT_S)
GROUPED = replace(POD, labels={**POD.labels, names.LWS_GROUP: "a"})
LEFT, RIGHT = Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)
UNKNOWN = "UnknownToPlanner"
NO_PROBE = "no rank has requested its weights yet, and no readinessProbe shows whether the engine serves"
NO_PROBE_GRACED, NO_PROBE_STARTED, NO_PROBE_SLOW = (
    replace(one, has_readiness_probe=False) for one in (GRACED, STARTED, SLOW)
)
UID = POD.uid


def observed(
    one: ObservedPod,
    instances: Sequence[InstanceInfo] = (),
    forks: Sequence[ForkInfo] = (),
    planner_down_since: float | None = None,
) -> ObservedState:
    return observe(
        NOW,
        {one.uid: one},
        {},
        PlannerSnapshot(NOW, tuple(instances), tuple(forks)),
        planner_down_since=planner_down_since,
    )


LOADING = instance(UID, "loading", chunks=43)
RECEIVING = fork(UID, chunks=43)


@pytest.mark.parametrize(
    ("one", "instances", "forks", "expected"),
    [
        (POD, [], [], (False, "Waiting", "no rank has requested its weights yet")),
        (POD, [instance(UID, "loading", chunks=0)], [fork(UID, reason="its seeds are full")],
         (False, "Planning", "no plan yet: its seeds are full")),
        (POD, [LOADING], [RECEIVING], (False, "Receiving", "receiving: 43 % of 15.2 GB")),
        (POD, [LOADING], [fork(UID, chunks=100)], (False, "Receiving", "receiving: 99 % of 15.2 GB")),
        (POD, [instance(UID, rank=LEFT), instance(UID, "loading", rank=RIGHT)],
         [fork(UID, "forked", rank=LEFT), fork(UID, rank=RIGHT, chunks=20)],
         (False, "Receiving", "receiving: 60 % of 30.4 GB")),
        (POD, [instance(UID, "loading")], [fork(UID, "forked")],
         (False, "Starting", "the weights are complete or loading; the engine does not serve yet")),
        (POD, [instance(UID, "loading")], [fork(UID, "fallback")],
         (False, "FallingBack", "the weights were loaded by a fallback; the engine does not serve yet")),
        (POD, [LOADING], [fork(UID, "failed", reasons=("NoSource: no seed is left",))],
         (False, "ForkFailed", "fork failed: NoSource: no seed is left")),
        (POD, [instance(UID)], [fork(UID, "forked")], (True, "Forked", "1 rank is complete: 15.2 GB")),
        (POD, [instance(UID)], [], (True, "Serving", "1 rank is complete: 15.2 GB")),
        (POD, [instance(UID, "draining")], [], (True, "Serving", "1 rank is complete: 15.2 GB")),
        (POD, [instance(UID, chunks=0)], [fork(UID, "fallback")],
         (True, "FellBack", "the weights were loaded by a fallback")),
        (POD, [instance(UID, chunks=50)], [fork(UID, chunks=50)],
         (False, "Receiving", "receiving: 50 % of 15.2 GB")),
        (POD, [instance(UID, rank=LEFT)], [],
         (False, "RanksMissing", "1 rank is complete; the others have not requested their weights yet")),
        (GROUPED, [instance(UID, rank=LEFT)], [], (True, "Serving", "1 rank is complete: 15.2 GB")),
        (GRACED, [instance(UID, rank=LEFT)], [],
         (True, UNKNOWN, "the planner does not know all of the Pod's ranks")),
        (STARTED, [], [], (False, "Waiting", "no rank has requested its weights yet")),
        (GRACED, [], [], (True, UNKNOWN, "the planner does not know the Pod; it loaded without rfork")),
        (STARTED, [], [fork(UID, "fallback")], (True, "FellBack", "the weights were loaded by a fallback")),
        (POD, [], [fork(UID, "fallback")],
         (False, "FallingBack", "the weights were loaded by a fallback; the engine does not serve yet")),
        (GRACED, [LOADING], [RECEIVING], (False, "Receiving", "receiving: 43 % of 15.2 GB")),
        (SLOW, [LOADING], [RECEIVING],
         (True, "LoadTimeout",
          "the containers have been ready for 900 s, although the planner reports ranks as loading")),
        # Without a probe, ready containers prove nothing.
        (NO_PROBE_STARTED, [], [], (False, "Waiting", "no rank has requested its weights yet")),
        (NO_PROBE_GRACED, [], [], (False, "Waiting", NO_PROBE)),
        (NO_PROBE_SLOW, [], [], (True, UNKNOWN, "the planner does not know the Pod; it loaded without rfork")),
        (NO_PROBE_GRACED, [], [fork(UID, "fallback")],
         (False, "FallingBack", "the weights were loaded by a fallback; the engine does not serve yet")),
        (NO_PROBE_GRACED, [instance(UID, rank=LEFT)], [],
         (False, "RanksMissing", "1 rank is complete; the others have not requested their weights yet")),
        (NO_PROBE_GRACED, [instance(UID)], [fork(UID, "forked")], (True, "Forked", "1 rank is complete: 15.2 GB")),
        # A restarted container: its earlier state is irrelevant.
        (POD, [instance(UID, "loading", start="11")], [fork(UID, "forked"), fork(UID, start="11", chunks=10)],
         (False, "Receiving", "receiving: 10 % of 15.2 GB")),
    ],
)  # fmt: skip
def test_the_condition_is_true_once_all_ranks_serve(
    one: ObservedPod,
    instances: Sequence[InstanceInfo],
    forks: Sequence[ForkInfo],
    expected: tuple[bool, str, str],
) -> None:
    """True once all known ranks of the Pod serve; until then, the message shows the progress."""
    assert GateDecision(*expected) == decide_gate(observed(one, instances, forks), one, GRACE_S, MAX_WAIT_S)


@pytest.mark.parametrize(
    ("one", "planner_down_s", "expected"),
    [
        (POD, 100.0, "Receiving"),
        (STARTED, 100.0, "Receiving"),
        (GRACED, GRACE_S - 1, "Receiving"),
        (GRACED, GRACE_S, UNKNOWN),
        (NO_PROBE_GRACED, 100.0, "Receiving"),
        (NO_PROBE_SLOW, GRACE_S, UNKNOWN),
    ],
)
def test_without_a_planner_a_ready_pod_waits_only_for_the_grace_period(
    one: ObservedPod, planner_down_s: float, expected: str
) -> None:
    """A ready Pod is blocked only for the grace period, measured for both the Pod and the outage."""
    planner_down = observed(one, [LOADING], [RECEIVING], planner_down_since=NOW - planner_down_s)
    assert expected == decide_gate(planner_down, one, GRACE_S, MAX_WAIT_S).reason


def written_condition(status: bool, message: str, age_s: float) -> WrittenCondition:
    return WrittenCondition(GateDecision(status, "Receiving", message), NOW - age_s)


@pytest.mark.parametrize(
    ("before", "instances", "expected"),
    [
        (None, [LOADING], True),
        (written_condition(False, "receiving: 43 % of 15.2 GB", 60), [LOADING], False),
        (written_condition(False, "receiving: 42 % of 15.2 GB", 4.9), [LOADING], False),
        (written_condition(False, "receiving: 42 % of 15.2 GB", 5.0), [LOADING], True),
        (written_condition(False, "receiving: 99 % of 15.2 GB", 0.1), [instance(UID)], True),
        (written_condition(True, "complete", 9), [instance(UID)], False),
        (written_condition(True, "complete", 10), [instance(UID)], True),
    ],
)
def test_messages_are_written_rarely_and_completion_immediately(
    before: WrittenCondition | None, instances: Sequence[InstanceInfo], expected: bool
) -> None:
    """Messages are written rarely and only if changed; completion immediately, and again if it was lost."""
    forks = [RECEIVING] if instances == [LOADING] else []
    found = decide(observed(POD, instances, forks), {UID: before} if before else {}, GRACE_S, MAX_WAIT_S)
    assert expected == bool(found)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (None, True),
        (WrittenCondition(GateDecision(False, "Waiting", "…"), NOW - GRACE_S), True),
        (WrittenCondition(GateDecision(False, "Waiting", "…"), NOW - GRACE_S + 1), False),
        (WrittenCondition(GateDecision(False, "Receiving", "…"), NOW - GRACE_S), False),
    ],
)
def test_a_restarted_planner_does_not_make_pods_unknown(before: WrittenCondition | None, expected: bool) -> None:
    """A Pod that it does not know yet does not count as unknown."""
    (found,) = decide(observed(GRACED), {UID: before} if before else {}, GRACE_S, MAX_WAIT_S)
    assert expected == found.decision.status


def test_with_many_pods_messages_are_rarer() -> None:
    """With a thousand waiting Pods, each gets a message every 50 seconds: 20 writes per second in total."""
    pods = {one.uid: one for one in (pod(number) for number in range(1000))}
    before = {name: written_condition(False, "other", 49.9) for name in pods}
    assert 0 == len(decide(observe(NOW, pods), before, GRACE_S, MAX_WAIT_S))
    before = {name: written_condition(False, "other", 50.0) for name in pods}
    assert 1000 == len(decide(observe(NOW, pods), before, GRACE_S, MAX_WAIT_S))


@pytest.mark.parametrize(
    "one",
    [
        pod(5, gates=()),
        pod(5, conditions={names.WEIGHTS_READY: True}),
        pod(5, deleting=True),
        pod(5, phase="Succeeded"),
    ],
)
def test_pods_without_a_closed_gate_are_ignored(one: ObservedPod) -> None:
    """Pods without the gate, with an open gate (which never closes), and terminating Pods."""
    assert () == decide(observed(one, [LOADING], [RECEIVING]), {}, GRACE_S, MAX_WAIT_S)
