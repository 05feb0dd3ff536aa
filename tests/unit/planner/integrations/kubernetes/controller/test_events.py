"""Events for forks, webhook problems and scale-ups, each written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.events import (
    decide,
    keys_of_existing_pods,
    keys_of_finished_forks,
    scaleup_event,
)
from planner.integrations.kubernetes.controller.observed_state import ObservedState, PlannerSnapshot, observe
from planner.integrations.kubernetes.controller.scaleups import PendingScaleUp
from rfork.schema import ForkInfo, Placement, Rank, ScaleUp
from tests.unit.planner.integrations.kubernetes.fake_cluster import MODEL, pod, uid, workload
from tests.unit.planner.integrations.kubernetes.fake_planner_api import (
    fork,
    instance,
    instance_id,
    scaleup_view,
)

NOW: Final = 1000.0
POD = pod(5)
OLD = pod(5, containers_ready_at=NOW)
SOURCES = {
    instance_id(uid(6)): 10_000_000_000, instance_id(uid(7)): 3_000_000_000,
    instance_id(uid(8)): 2_000_000_000, "a-server": 200_000_000,
}  # fmt: skip
LEFT, RIGHT = Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)
NO_SEED = ("SourceBusy: all are full", "NoSource: no seed with this layout: 1 holds another")
S3 = "snapshot s3://models/llama"


def observed(forks: Sequence[ForkInfo] = (), *pods: ObservedPod, at: float = NOW) -> ObservedState:
    """Pod 6 exists, pod 7 was deleted, and pod 8 belongs to another cluster."""
    there = {one.uid: one for one in (*(pods or (POD,)), pod(6, containers_ready_at=1.0))}
    elsewhere = instance(uid(8), placement=Placement(host="x", pod="other/seed"))
    return observe(NOW, there, {}, PlannerSnapshot(at, (elsewhere,), tuple(forks)), deleted={uid(7): pod(7)})


def emitted(found: ObservedState, already: frozenset[str] = frozenset()) -> list[str]:
    return [f"{one.event_type} {one.reason}: {one.message}" for one in decide(found, already)]


@pytest.mark.parametrize(
    ("one", "forks", "expected"),
    [
        (POD, [fork(uid(5), chunks=5)], []),
        (POD, [fork(uid(5), "forked", sources={instance_id(uid(6)): 15_200_000_000})],
         ["Normal Forked: forked 15.2 GB from pod-6 in 3.1 s, 1 source"]),
        (POD, [fork(uid(5), "forked", sources=SOURCES)],
         ["Normal Forked: forked 15.2 GB from pod-6 in 3.1 s, 4 sources"]),
        (POD, [fork(uid(5), "forked", sources={instance_id(uid(7)): 5})],
         ["Normal Forked: forked 0.0 kB from pod-7 in 3.1 s, 1 source"]),
        (POD, [fork(uid(5), "forked", sources={instance_id(uid(8)): 5_000_000})],
         ["Normal Forked: forked 5.0 MB from other/seed in 3.1 s, 1 source"]),
        (POD, [fork(uid(5), "forked", sources={"unheard-of": 2_000_000_000_000})],
         ["Normal Forked: forked 2.0 TB from unheard-of in 3.1 s, 1 source"]),
        (POD, [fork(uid(5), "forked", sources={"snapshot:s3://m": 15_200_000_000})],
         ["Normal Loaded: read 15.2 GB from snapshot:s3://m in 3.1 s, for itself and other instances"]),
        (POD, [fork(uid(5), "forked")], ["Normal Forked: forked in 3.1 s"]),
        (POD, [fork(uid(5), "fallback", fallback=S3, reasons=NO_SEED)],
         [f"Warning FellBack: fell back to {S3}: no seed with this layout: 1 holds another"]),
        (POD, [fork(uid(5), "fallback")],
         ["Warning FellBack: fell back to its own loader: no reason reported"]),
        (POD, [fork(uid(5), "failed", reasons=("the instance stopped sending heartbeats",))],
         ["Warning ForkFailed: fork failed: the instance stopped sending heartbeats"]),
        (POD, [fork(uid(5), "interrupted")], []),
        # All ranks share one Event: the sum of the bytes, the time of the slowest.
        (POD, [fork(uid(5), "forked", rank=LEFT, sources={instance_id(uid(6), LEFT): 8_000_000_000}),
               fork(uid(5), "forked", rank=RIGHT, sources={instance_id(uid(6), RIGHT): 8_000_000_000},
                    seconds=4.0)],
         ["Normal Forked: forked 16.0 GB from pod-6 in 4.0 s, 1 source"]),
        (POD, [fork(uid(5), "forked", rank=LEFT), fork(uid(5), rank=RIGHT, chunks=5)], []),
        (POD, [fork(uid(5), "forked", rank=LEFT)], []),
        (POD, [fork(uid(5), "forked", rank=LEFT, age_s=70)], ["Normal Forked: forked in 3.1 s"]),
        (OLD, [fork(uid(5), "forked", rank=LEFT)], ["Normal Forked: forked in 3.1 s"]),
        (POD, [fork(uid(5), "forked", rank=LEFT), fork(uid(5), "fallback", rank=RIGHT, fallback=S3)],
         [f"Warning FellBack: fell back to {S3}: no reason reported (1 of 2 ranks)"]),
        # An unknown Pod.
        (POD, [fork(uid(9), "forked")], []),
    ],
)  # fmt: skip
def test_each_fork_result_has_an_event(one: ObservedPod, forks: Sequence[ForkInfo], expected: list[str]) -> None:
    """One Event per Pod, once all its ranks have finished."""
    assert expected == emitted(observed(forks, one))


NEW, OLD_VERSION = "files:" + "3f" * 16, "files:" + "91" * 16
FIRST = ("NoSource: first of version files:3f3f3f3f of model llama; 4 instances serve files:91919191",)
CHECKPOINT = {"checkpoint:file:///models/llama": 15_200_000_000}


@pytest.mark.parametrize(
    ("forks", "expected"),
    [
        ([fork(uid(5), "fallback", fallback="loader", reasons=FIRST, version=NEW)],
         "Normal FirstOfVersion: loaded from storage: first of version files:3f3f3f3f; "
         "1 instance serves files:91919191"),
        ([fork(uid(5), "forked", sources=CHECKPOINT, version=NEW)],
         "Normal FirstOfVersion: loaded from storage: first of version files:3f3f3f3f; "
         "1 instance serves files:91919191"),
        # The version that is served.
        ([fork(uid(5), "forked", sources=CHECKPOINT, version=OLD_VERSION)],
         "Normal Loaded: read 15.2 GB from checkpoint:file:///models/llama in 3.1 s, for itself and other instances"),
        # It had sources and lost them.
        ([fork(uid(5), "fallback", fallback="loader", reasons=(*FIRST, "SourceUnavailable: why"), version=NEW)],
         "Warning FellBack: fell back to loader: why"),
        ([fork(uid(5), "forked", sources={instance_id(uid(6)): 15_200_000_000}, version=OLD_VERSION)],
         "Normal Forked: forked 15.2 GB from pod-6 in 3.1 s, 1 source, version files:91919191"),
        ([fork(uid(5), "forked", sources={instance_id(uid(6)): 15_200_000_000}, version="unnamed:x")],
         "Normal Forked: forked 15.2 GB from pod-6 in 3.1 s, 1 source"),
    ],
)  # fmt: skip
def test_events_name_the_version(forks: Sequence[ForkInfo], expected: str) -> None:
    """The first Pod of a version loads from storage, which is normal; others name the forked version."""
    there = {one.uid: one for one in (POD, pod(6, containers_ready_at=1.0))}
    snapshot = PlannerSnapshot(NOW, (instance(uid(6), version=OLD_VERSION),), tuple(forks))
    assert [expected] == emitted(observe(NOW, there, {}, snapshot))


def test_forks_that_finished_before_the_lead_are_not_reported() -> None:
    """A new leader reports forks that finish after its first poll."""
    ended, running = fork(uid(5), "forked"), fork(uid(6), chunks=5)
    before = keys_of_finished_forks(PlannerSnapshot(NOW, forks=(ended, running)))
    assert [] == emitted(observed([ended, running]), before)
    assert ["Normal Forked: forked in 3.1 s"] == emitted(observed([ended, fork(uid(6), "forked")]), before)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (POD, []),
        (pod(5, annotations={names.REJECTED: "two containers start an engine"}, created_at=900.0),
         ["Warning NotInjected: Pod left unchanged: two containers start an engine"]),
        (pod(5, annotations={names.INJECTED: "1", names.NOTES: "no IPC\nno hook\n"}, created_at=900.0),
         ["Warning PartiallyInjected: no IPC; no hook"]),
        (pod(5, annotations={}, created_at=900.0),
         ["Warning WebhookBypassed: the webhook was not called for this Pod; it loads without rfork"]),
        (pod(5, annotations={}, created_at=NOW - 300), []),
        (pod(5, annotations={names.INJECT: "false"}, created_at=900.0), []),
        (pod(5, annotations={names.REJECTED: "why"}, created_at=0.0),
         ["Warning NotInjected: Pod left unchanged: why"]),
        (pod(5, annotations={names.REJECTED: "why"}, created_at=900.0, phase="Failed"), []),
    ],
)  # fmt: skip
def test_webhook_problems_have_events(one: ObservedPod, expected: list[str]) -> None:
    """For Pods that the webhook rejected, injected partially, or was not called for."""
    assert expected == emitted(observed((), one))


def test_each_fact_is_reported_once() -> None:
    """Reported keys are not reported again."""
    refused = pod(9, annotations={names.REJECTED: "why"}, created_at=900.0)
    found = observed([fork(uid(5), "forked")], POD, refused)
    keys = frozenset[str]().union(*(one.keys for one in decide(found, frozenset())))
    assert 2 == len(keys)
    assert [] == emitted(found, keys)


def test_pods_created_before_the_lead_are_not_reported() -> None:
    """A new leader reports Pods that are created after it took over."""
    refused = pod(5, annotations={names.REJECTED: "why"})
    assert [] == emitted(observed((), refused), keys_of_existing_pods([refused]))


def test_a_fork_that_continued_is_reported_again() -> None:
    """The planner abandoned it, but its instance was alive: the success is reported."""
    failed, went_on = fork(uid(5), "failed"), fork(uid(5), "forked")
    (first,) = decide(observed([failed]), frozenset())
    assert ["Normal Forked: forked in 3.1 s"] == emitted(observed([went_on]), first.keys)


def test_long_reasons_are_truncated() -> None:
    """The API server accepts 1,024 bytes."""
    (one,) = emitted(observed([fork(uid(5), "failed", reasons=("ü" * 900,))]))
    assert one.endswith("ü…")
    assert len(one.removeprefix("Warning ForkFailed: ").encode()) in range(998, 1001)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (1, "1 replica is expected: they fork from 2 seeds"),
        (3, "3 replicas are expected: they fork from 2 seeds"),
    ],
)
def test_the_event_of_a_scale_up_contains_the_planners_reason(replicas: int, message: str) -> None:
    """It is about the workload and contains the planner's reason."""
    scaleup = ScaleUp(scaleup_id="a", model=MODEL, replicas=replicas)
    one = scaleup_event(PendingScaleUp(workload().ref, scaleup), scaleup_view(scaleup))
    assert "Deployment" == one.subject.kind
    assert "ScaleUp" == one.reason
    assert message == one.message
