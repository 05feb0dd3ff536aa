from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import PodSeen
from planner.hooks.kubernetes.controller.readiness import Said, Verdict, decide, judge
from planner.hooks.kubernetes.controller.scene import Look, Scene, scene
from rfork.wire import ForkView, InstanceView, Rank
from tests.unit.hooks.kubernetes.fake_cluster import pod
from tests.unit.hooks.kubernetes.fake_fleet import fork, instance

NOW: Final = 1000.0
GRACE: Final = 10.0
LONGEST: Final = 900.0
POD = pod(5)
STARTED = pod(5, phase="Running", containers_ready_at=NOW - 2)
GRACED = pod(5, phase="Running", containers_ready_at=NOW - GRACE)
SLOW = pod(5, phase="Running", containers_ready_at=NOW - LONGEST)
GROUPED = replace(POD, labels={**POD.labels, names.LWS_GROUP: "a"})
LEFT, RIGHT = Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)
UNKNOWN = "UnknownToPlanner"
NO_PROBE = (
    "no rank has asked for its weights yet, "
    "and there is no readinessProbe that tells whether the engine serves"
)
BLIND, BLIND_STARTED, BLIND_SLOW = (replace(one, probed=False) for one in (GRACED, STARTED, SLOW))
UID = POD.uid


def seen(
    one: PodSeen,
    instances: Sequence[InstanceView] = (),
    forks: Sequence[ForkView] = (),
    away_since: float | None = None,
) -> Scene:
    return scene(NOW, {one.uid: one}, {}, Look(NOW, tuple(instances), tuple(forks)), away_since=away_since)


LOADING = instance(UID, "loading", chunks=43)
RECEIVING = fork(UID, chunks=43)


@pytest.mark.parametrize(
    ("one", "instances", "forks", "expected"),
    [
        (POD, [], [], (False, "Waiting", "no rank has asked for its weights yet")),
        (POD, [instance(UID, "loading", chunks=0)], [fork(UID, reason="its seeds are full")],
         (False, "Planning", "no plan yet: its seeds are full")),
        (POD, [LOADING], [RECEIVING], (False, "Receiving", "receiving: 43 % of 15.2 GB")),
        (POD, [LOADING], [fork(UID, chunks=100)], (False, "Receiving", "receiving: 99 % of 15.2 GB")),
        (POD, [instance(UID, rank=LEFT), instance(UID, "loading", rank=RIGHT)],
         [fork(UID, "forked", rank=LEFT), fork(UID, rank=RIGHT, chunks=20)],
         (False, "Receiving", "receiving: 60 % of 30.4 GB")),
        (POD, [instance(UID, "loading")], [fork(UID, "forked")],
         (False, "Starting", "the weights are whole or loading; the engine does not serve yet")),
        (POD, [instance(UID, "loading")], [fork(UID, "fallback")],
         (False, "FallingBack", "a fallback loaded the weights; the engine does not serve yet")),
        (POD, [LOADING], [fork(UID, "failed", reasons=("NoSource: nobody is left",))],
         (False, "ForkFailed", "the fork failed: NoSource: nobody is left")),
        (POD, [instance(UID)], [fork(UID, "forked")], (True, "Forked", "1 rank is whole: 15.2 GB")),
        (POD, [instance(UID)], [], (True, "Serving", "1 rank is whole: 15.2 GB")),
        (POD, [instance(UID, "draining")], [], (True, "Serving", "1 rank is whole: 15.2 GB")),
        (POD, [instance(UID, chunks=0)], [fork(UID, "fallback")],
         (True, "FellBack", "the weights were loaded by a fallback")),
        (POD, [instance(UID, chunks=50)], [fork(UID, chunks=50)],
         (False, "Receiving", "receiving: 50 % of 15.2 GB")),
        (POD, [instance(UID, rank=LEFT)], [],
         (False, "RanksMissing", "1 rank is whole; others have not asked yet")),
        (GROUPED, [instance(UID, rank=LEFT)], [], (True, "Serving", "1 rank is whole: 15.2 GB")),
        (GRACED, [instance(UID, rank=LEFT)], [],
         (True, UNKNOWN, "the planner does not know all of the Pod's ranks")),
        (STARTED, [], [], (False, "Waiting", "no rank has asked for its weights yet")),
        (GRACED, [], [], (True, UNKNOWN, "the planner does not know the Pod: it loaded by itself")),
        (STARTED, [], [fork(UID, "fallback")], (True, "FellBack", "the weights were loaded by a fallback")),
        (POD, [], [fork(UID, "fallback")],
         (False, "FallingBack", "a fallback loaded the weights; the engine does not serve yet")),
        (GRACED, [LOADING], [RECEIVING], (False, "Receiving", "receiving: 43 % of 15.2 GB")),
        (SLOW, [LOADING], [RECEIVING],
         (True, "TookTooLong",
          "the containers have been ready for 900 s, though ranks are said to be loading")),
        # Without a probe ready containers say nothing.
        (BLIND_STARTED, [], [], (False, "Waiting", "no rank has asked for its weights yet")),
        (BLIND, [], [], (False, "Waiting", NO_PROBE)),
        (BLIND_SLOW, [], [], (True, UNKNOWN, "the planner does not know the Pod: it loaded by itself")),
        (BLIND, [], [fork(UID, "fallback")],
         (False, "FallingBack", "a fallback loaded the weights; the engine does not serve yet")),
        (BLIND, [instance(UID, rank=LEFT)], [],
         (False, "RanksMissing", "1 rank is whole; others have not asked yet")),
        (BLIND, [instance(UID)], [fork(UID, "forked")], (True, "Forked", "1 rank is whole: 15.2 GB")),
        # A container that was started again: what it was before it says nothing of what it is now.
        (POD, [instance(UID, "loading", start="11")], [fork(UID, "forked"), fork(UID, start="11", chunks=10)],
         (False, "Receiving", "receiving: 10 % of 15.2 GB")),
    ],
)  # fmt: skip
def test_the_condition(
    one: PodSeen,
    instances: Sequence[InstanceView],
    forks: Sequence[ForkView],
    expected: tuple[bool, str, str],
) -> None:
    """True once all that the planner knows of the Pod serves; before that, how far it is."""
    assert Verdict(*expected) == judge(seen(one, instances, forks), one, GRACE, LONGEST)


@pytest.mark.parametrize(
    ("one", "away_s", "expected"),
    [
        (POD, 100.0, "Receiving"),
        (STARTED, 100.0, "Receiving"),
        (GRACED, GRACE - 1, "Receiving"),
        (GRACED, GRACE, UNKNOWN),
        (BLIND, 100.0, "Receiving"),
        (BLIND_SLOW, GRACE, UNKNOWN),
    ],
)
def test_the_planner_is_away(one: PodSeen, away_s: float, expected: str) -> None:
    """It holds a Pod back no longer than the grace, of the Pod's readiness and of its own silence."""
    away = seen(one, [LOADING], [RECEIVING], away_since=NOW - away_s)
    assert expected == judge(away, one, GRACE, LONGEST).reason


def said(status: bool, message: str, age_s: float) -> Said:
    return Said(Verdict(status, "Receiving", message), NOW - age_s)


@pytest.mark.parametrize(
    ("before", "instances", "expected"),
    [
        (None, [LOADING], True),
        (said(False, "receiving: 43 % of 15.2 GB", 60), [LOADING], False),
        (said(False, "receiving: 42 % of 15.2 GB", 4.9), [LOADING], False),
        (said(False, "receiving: 42 % of 15.2 GB", 5.0), [LOADING], True),
        (said(False, "receiving: 99 % of 15.2 GB", 0.1), [instance(UID)], True),
        (said(True, "whole", 9), [instance(UID)], False),
        (said(True, "whole", 10), [instance(UID)], True),
    ],
)
def test_how_often_it_is_written(
    before: Said | None, instances: Sequence[InstanceView], expected: bool
) -> None:
    """A message only when it changed, and rarely; that it is whole at once, and again if it got lost."""
    forks = [RECEIVING] if instances == [LOADING] else []
    found = decide(seen(POD, instances, forks), {UID: before} if before else {}, GRACE, LONGEST)
    assert expected == bool(found)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (None, True),
        (Said(Verdict(False, "Waiting", "…"), NOW - GRACE), True),
        (Said(Verdict(False, "Waiting", "…"), NOW - GRACE + 1), False),
        (Said(Verdict(False, "Receiving", "…"), NOW - GRACE), False),
    ],
)
def test_a_planner_that_was_started_anew(before: Said | None, expected: bool) -> None:
    """A Pod that it does not know yet is not taken for one that it never hears of."""
    (found,) = decide(seen(GRACED), {UID: before} if before else {}, GRACE, LONGEST)
    assert expected == found.verdict.status


def test_many_pods_are_told_of_more_rarely() -> None:
    """Of a thousand that wait each has a message every 50 seconds: 20 writes a second in all."""
    pods = {one.uid: one for one in (pod(number) for number in range(1000))}
    before = {name: said(False, "other", 49.9) for name in pods}
    assert 0 == len(decide(scene(NOW, pods), before, GRACE, LONGEST))
    before = {name: said(False, "other", 50.0) for name in pods}
    assert 1000 == len(decide(scene(NOW, pods), before, GRACE, LONGEST))


@pytest.mark.parametrize(
    "one",
    [
        pod(5, gates=()),
        pod(5, conditions={names.WEIGHTS_READY: True}),
        pod(5, deleting=True),
        pod(5, phase="Succeeded"),
    ],
)
def test_whom_it_does_not_concern(one: PodSeen) -> None:
    """Pods without the gate, those where it is open (it never closes), and those that end."""
    assert () == decide(seen(one, [LOADING], [RECEIVING]), {}, GRACE, LONGEST)
