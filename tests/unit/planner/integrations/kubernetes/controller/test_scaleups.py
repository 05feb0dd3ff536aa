"""Scale-ups derived from workloads and Pods, and their announcement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import pytest

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObjectRef, ObservedPod, ObservedWorkload
from planner.integrations.kubernetes.controller.observed_state import PlannerSnapshot, observe
from planner.integrations.kubernetes.controller.scaleups import (
    MAX_HOSTS,
    REANNOUNCE_INTERVAL_S,
    MissingReplicas,
    PendingScaleUp,
    PendingState,
    ScaleUpMismatch,
    announced_sizes,
    find_mismatches,
    hosts_to_announce,
    known_ids,
    pending_replicas,
    scaleup_id,
    to_announce,
    to_withdraw,
    workload_uid,
)
from rfork.schema import ScaleUp, ScaleUpInfo
from tests.unit.planner.integrations.kubernetes.fake_cluster import MODEL, pod, uid, workload
from tests.unit.planner.integrations.kubernetes.fake_planner_api import fork, instance, scaleup_view

NOW: Final = 1000.0
TTL_S: Final = 900.0
GROUP = "leaderworkerset.sigs.k8s.io/name"
TWO_PODS_PER_REPLICA = {names.REPLICA_PODS: "2"}

DEPLOYMENT = workload(1, 4)
STATEFUL = workload(1, 4, kind="StatefulSet", template_annotations=TWO_PODS_PER_REPLICA)
LWS = workload(1, 3, kind="LeaderWorkerSet")
JOB = ObjectRef("Job", "batch/v1", "default", "batch", "the-job")
READY = 950.0
NO_NODE, BOUND = {"PodScheduled": False}, {"PodScheduled": True}


def new_pod(number: int, of: ObservedWorkload | None = DEPLOYMENT, **changes: object) -> ObservedPod:
    """Return a Pod that was created ten seconds ago."""
    return pod(number, of, **{"created_at": NOW - 10, **changes})  # type: ignore[arg-type]


def member(number: int, group: str, **changes: object) -> ObservedPod:
    """Return a Pod of a group of `LWS`, owned by a StatefulSet that is not watched."""
    labels = {names.MODEL: MODEL, GROUP: LWS.name, names.LWS_GROUP: group}
    owner = ObjectRef("StatefulSet", "apps/v1", "default", f"serve-1-{group}", f"of-{group}")
    return replace(new_pod(number, None, **changes), labels=labels, owner=owner)


def replica_counts(found: Mapping[str, PendingScaleUp]) -> dict[str, int]:
    return {name: one.scaleup.replicas for name, one in found.items()}


@pytest.mark.parametrize(
    ("workloads", "pods", "known", "expected"),
    [
        pytest.param([DEPLOYMENT], [], [], {uid(1): 4}, id="wanted, no Pods yet"),
        pytest.param([workload(1, 0)], [], [], {}, id="none wanted"),
        pytest.param([DEPLOYMENT], [new_pod(n) for n in (5, 6, 7)], [], {uid(1): 4}, id="some created"),
        pytest.param([DEPLOYMENT], [new_pod(n) for n in (5, 6, 7)], [5, 6], {uid(1): 2}, id="some arrived"),
        pytest.param([DEPLOYMENT], [new_pod(n) for n in (5, 6, 7, 8)], [5, 6, 7, 8], {}, id="all arrived"),
        pytest.param(
            [DEPLOYMENT], [new_pod(n, containers_ready_at=READY) for n in (5, 6, 7, 8)], [], {},
            id="ready, but unknown to the planner",
        ),
        pytest.param(
            [DEPLOYMENT], [*(new_pod(n) for n in (5, 6, 7, 8)), new_pod(9, template="77777")], [5, 6, 7, 8],
            {uid(1): 1}, id="a rolling update's surge",
        ),
        pytest.param(
            [DEPLOYMENT], [*(new_pod(n) for n in (5, 6, 7)), new_pod(8, deleting=True)], [5, 6, 7, 8],
            {uid(1): 1}, id="one is terminating: a replacement is expected",
        ),
        pytest.param(
            [DEPLOYMENT], [*(new_pod(n) for n in (5, 6, 7)), new_pod(8, phase="Failed")], [5, 6, 7, 8],
            {uid(1): 1}, id="one was evicted: a replacement is expected",
        ),
        pytest.param(
            [DEPLOYMENT], [*(new_pod(n) for n in (5, 6, 7)), new_pod(8, created_at=NOW - TTL_S)], [5, 6, 7], {},
            id="pending for too long",
        ),
        pytest.param(
            [DEPLOYMENT], [new_pod(n, containers_ready_at=READY, has_readiness_probe=False) for n in (5, 6, 7, 8)], [5],
            {uid(1): 3}, id="no readiness probe",
        ),
        pytest.param(
            [DEPLOYMENT], [new_pod(5), *(new_pod(n, conditions=NO_NODE) for n in (6, 7, 8))], [], {uid(1): 1},
            id="three are unschedulable",
        ),
        pytest.param(
            [DEPLOYMENT],
            [new_pod(n, conditions=BOUND, created_at=NOW - 2000, scheduled_at=NOW - 5) for n in (5, 6, 7, 8)],
            [5], {uid(1): 3}, id="scheduled after a long wait",
        ),
        pytest.param(
            [DEPLOYMENT], [new_pod(n, annotations={names.REJECTED: "why"}) for n in (5, 6, 7, 8)], [], {},
            id="not injected: they never fork",
        ),
        pytest.param(
            [workload(1, 4, template_annotations={names.INJECT: "false"})], [], [], {},
            id="injection is off",
        ),
        pytest.param([workload(1, 4, deleting=True)], [], [], {}, id="being deleted"),
        pytest.param([STATEFUL], [], [], {uid(1): 2}, id="two Pods per replica"),
        pytest.param(
            [STATEFUL], [new_pod(n, STATEFUL) for n in (5, 6, 7, 8)], [5], {uid(1): 2}, id="half of one arrived",
        ),
        pytest.param(
            [STATEFUL], [new_pod(n, STATEFUL) for n in (5, 6, 7, 8)], [5, 6], {uid(1): 1}, id="one of two arrived",
        ),
        pytest.param([LWS], [], [], {uid(1): 3}, id="groups"),
        pytest.param(
            [LWS], [member(5, "a"), member(6, "a"), member(7, "b")], [], {uid(1): 3}, id="groups with Pods",
        ),
        pytest.param(
            [LWS], [member(5, "a"), member(6, "a"), member(7, "b"), member(8, "b")], [5], {uid(1): 2},
            id="a rank of a group arrived",
        ),
        pytest.param(
            [LWS], [member(5, "a"), member(6, "a", conditions=NO_NODE), member(7, "b")], [], {uid(1): 2},
            id="one Pod of a group is unschedulable",
        ),
        pytest.param(
            [], [new_pod(5, None, owner=JOB), new_pod(6, None, owner=JOB), new_pod(7, None)], [6],
            {"the-job": 1, uid(7): 1}, id="a Job's Pods, and a bare Pod",
        ),
        pytest.param(
            [], [new_pod(n) for n in (5, 6)], [], {f"replicaset-of-{uid(1)}-5d4f8": 2},
            id="Pods of a Deployment without the label",
        ),
    ],
)  # fmt: skip
def test_replicas_without_a_fork_are_expected(
    workloads: Sequence[ObservedWorkload],
    pods: Sequence[ObservedPod],
    known: Sequence[int],
    expected: dict[str, int],
) -> None:
    """Wanted replicas that have not requested their forks, by the UID of their workload."""
    snapshot = PlannerSnapshot(NOW, tuple(instance(uid(number), "loading", chunks=0) for number in known))
    seen = observe(NOW, {one.uid: one for one in pods}, {one.uid: one for one in workloads}, snapshot)
    found = pending_replicas(seen, {}, TTL_S).pending_replicas
    assert expected == replica_counts(found)


def test_a_fork_counts_as_arrival() -> None:
    """Even if the planner has forgotten the instance."""
    pods = {one.uid: one for one in (new_pod(5), new_pod(6))}
    snapshot = PlannerSnapshot(NOW, forks=(fork(uid(5), "failed"),))
    found = pending_replicas(observe(NOW, pods, {uid(1): workload(1, 2)}, snapshot), {}, TTL_S).pending_replicas
    assert {uid(1): 1} == replica_counts(found)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (({names.MODEL: "llama"}, {}), "llama"),
        (({names.MODEL: "llama"}, {names.MODEL_NAME: "meta/llama"}), "meta/llama"),
        (({names.MODEL: "llama"}, {names.MODEL_NAME: "two\nlines"}), None),
        (({}, {}), None),
    ],
)
def test_the_annotation_overrides_the_label_of_the_model(
    template: tuple[dict[str, str], dict[str, str]], expected: str | None
) -> None:
    """The template's annotation overrides the label; an invalid name is not announced."""
    one = workload(1, 1, template_labels=template[0], template_annotations=template[1])
    found = pending_replicas(observe(NOW, {}, {one.uid: one}), {}, TTL_S).pending_replicas
    assert ([expected] if expected else []) == [each.scaleup.model for each in found.values()]


V1, V2 = {names.INJECTED: "1", names.VERSION: "v1"}, {names.INJECTED: "1", names.VERSION: "v2"}
ROLLING = workload(1, 4, template_annotations={names.VERSION: "v2"})


@pytest.mark.parametrize(
    ("one", "pods", "known", "expected"),
    [
        pytest.param(ROLLING, [], [], {"v2": 4}, id="no Pods yet: all with the template's version"),
        pytest.param(
            ROLLING, [new_pod(5, annotations=V1), new_pod(6, annotations=V1), new_pod(7, annotations=V2)], [],
            {"v1": 2, "v2": 2}, id="old Pods that have not arrived, one new, and one missing",
        ),
        pytest.param(
            ROLLING, [*(new_pod(n, annotations=V1) for n in (5, 6, 7, 8)), new_pod(9, annotations=V2)],
            [5, 6, 7, 8], {"v2": 1}, id="a rolling update's surge",
        ),
        pytest.param(
            workload(1, 4), [new_pod(5, annotations=V1)], [], {"v1": 1, None: 3}, id="no longer stated",
        ),
        pytest.param(
            workload(1, 2, template_labels={names.MODEL: MODEL, names.VERSION: "v3"}), [], [], {"v3": 2},
            id="by a label",
        ),
        pytest.param(
            workload(1, 2, template_annotations={names.VERSION: "two\nlines"}), [], [], {},
            id="an invalid version: the webhook rejects these Pods",
        ),
        pytest.param(
            LWS, [member(5, "a", annotations=V1), member(6, "a", annotations=V1)], [], {"v1": 1, None: 2},
            id="a group",
        ),
    ],
)  # fmt: skip
def test_each_version_is_a_separate_scale_up(
    one: ObservedWorkload, pods: Sequence[ObservedPod], known: Sequence[int], expected: dict[str | None, int]
) -> None:
    """Pods count for the version that they state, and replicas without Pods for the template's."""
    snapshot = PlannerSnapshot(NOW, tuple(instance(uid(number), "loading", chunks=0) for number in known))
    found = pending_replicas(
        observe(NOW, {pod.uid: pod for pod in pods}, {one.uid: one}, snapshot), {}, TTL_S
    ).pending_replicas
    assert expected == {each.scaleup.version: each.scaleup.replicas for each in found.values()}


def test_pods_of_a_job_are_counted_by_version() -> None:
    """A Job's template is unknown here."""
    pods = [new_pod(5, None, owner=JOB, annotations=V1), new_pod(6, None, owner=JOB, annotations=V2)]
    found = pending_replicas(observe(NOW, {pod.uid: pod for pod in pods}), {}, TTL_S).pending_replicas
    assert {"v1": 1, "v2": 1} == {each.scaleup.version: each.scaleup.replicas for each in found.values()}


def test_scale_up_ids_contain_the_workload_uid() -> None:
    """A version extends the id; without a version the id is the UID."""
    assert uid(1) == scaleup_id(uid(1), None)
    assert scaleup_id(uid(1), "v1") != scaleup_id(uid(1), "v2")
    assert [uid(1)] * 2 == [workload_uid(scaleup_id(uid(1), version)) for version in (None, "v1")]


def test_a_version_that_is_no_longer_expected_is_withdrawn() -> None:
    """Its scale-up belongs to this controller, although its id is not the UID of an existing workload."""
    name = scaleup_id(uid(1), "v1")
    reported = {name: scaleup_view(ScaleUp(scaleup_id=name, model=MODEL, version="v1", replicas=1))}
    first = find_mismatches({}, reported, (uid(1),), {}, POLLED_AT - 2)
    assert (name,) == to_withdraw({}, reported, find_mismatches({}, reported, (uid(1),), first, POLLED_AT), POLLED_AT)


@pytest.mark.parametrize(
    ("before", "replicas", "now", "expected"),
    [
        (None, 3, NOW, (MissingReplicas(3, NOW), 3, 900.0)),
        (MissingReplicas(3, NOW - 100), 3, NOW, (MissingReplicas(3, NOW - 100), 3, 800.0)),
        (MissingReplicas(2, NOW - 100), 3, NOW, (MissingReplicas(3, NOW), 3, 900.0)),
        (MissingReplicas(5, NOW - 100), 3, NOW, (MissingReplicas(3, NOW - 100), 3, 800.0)),
        (MissingReplicas(3, NOW - 899.9), 3, NOW, (MissingReplicas(3, NOW - 899.9), 3, 1.0)),
        (MissingReplicas(3, NOW - 900), 3, NOW, (MissingReplicas(3, NOW - 900), None, None)),
        (MissingReplicas(3, NOW - 100), 0, NOW, (None, None, None)),
    ],
)
def test_missing_replicas_expire(
    before: MissingReplicas | None,
    replicas: int,
    now: float,
    expected: tuple[MissingReplicas | None, int | None, float | None],
) -> None:
    """Counted from the moment when this many were missing, even if some have arrived since."""
    one = workload(1, replicas)
    waited = pending_replicas(observe(now, {}, {one.uid: one}), {one.uid: before} if before is not None else {}, TTL_S)
    found, rises = waited.pending_replicas, waited.missing_replicas
    scaleup = found[one.uid].scaleup if found else None
    assert expected == (
        rises.get(one.uid), scaleup.replicas if scaleup else None, scaleup.expires_in_s if scaleup else None,
    )  # fmt: skip


def pending(replicas: int, model: str = MODEL, hosts: tuple[str, ...] = ()) -> PendingScaleUp:
    return PendingScaleUp(workload().ref, ScaleUp(scaleup_id="a", model=model, replicas=replicas, hosts=hosts))


def known(replicas: int, arrived: int = 0, model: str = MODEL, hosts: tuple[str, ...] = ()) -> dict[str, ScaleUpInfo]:
    """Return the planner's list."""
    view = scaleup_view(pending(replicas, model, hosts).scaleup)
    return {"a": view.model_copy(update={"arrived_count": arrived})}


POLLED_AT: Final = NOW
UP, DOWN = ScaleUpMismatch(True, POLLED_AT - 2), ScaleUpMismatch(False, POLLED_AT - 2)


@pytest.mark.parametrize(
    ("reported", "differs", "urgent", "announced_s", "expected"),
    [
        pytest.param({}, None, False, None, True, id="unknown"),
        pytest.param({}, None, False, 9.9, False, id="unknown, just after it was announced"),
        pytest.param({}, None, True, 0.1, True, id="unknown, and the workload grew"),
        pytest.param(known(3), None, True, None, False, id="known"),
        pytest.param(known(5, 2), None, True, None, False, id="the remaining number"),
        pytest.param(known(3, 0, "other"), None, False, None, True, id="another model"),
        pytest.param(known(3, 1), replace(UP, snapshot_at=POLLED_AT), False, None, False, id="too few, in one poll"),
        pytest.param(known(3, 1), UP, False, None, True, id="too few, in two polls"),
        pytest.param(known(3, 1), UP, False, 9.9, False, id="too few, but announced recently"),
        pytest.param(known(3, 1), UP, False, REANNOUNCE_INTERVAL_S, True, id="too few, long after the announcement"),
        pytest.param(known(2), replace(UP, snapshot_at=POLLED_AT), True, 0.1, True, id="the workload grew"),
        pytest.param(known(5, 1), replace(DOWN, snapshot_at=POLLED_AT), True, None, False, id="too many, in one poll"),
        pytest.param(known(5, 1), DOWN, False, 0.1, True, id="too many, in two polls"),
    ],
)
def test_only_differences_are_announced(
    reported: dict[str, ScaleUpInfo],
    differs: ScaleUpMismatch | None,
    urgent: bool,
    announced_s: float | None,
    expected: bool,
) -> None:
    """Expected replicas are not announced again; increases are rate-limited, decreases need two polls."""
    found = to_announce(
        {"a": pending(3)},
        reported,
        {"a": differs} if differs else {},
        {"a"} if urgent else set(),
        {"a": announced_s} if announced_s is not None else {},
        POLLED_AT,
    )
    assert expected == bool(found)


@pytest.mark.parametrize(
    ("workloads", "pods", "known", "expected"),
    [
        pytest.param([DEPLOYMENT], [new_pod(5), new_pod(6)], [], {uid(1): ()}, id="not bound yet"),
        pytest.param(
            [DEPLOYMENT], [new_pod(5, node="b"), new_pod(6, node="a"), new_pod(7)], [], {uid(1): ("a", "b")},
            id="two of three are bound",
        ),
        pytest.param(
            [DEPLOYMENT], [new_pod(5, node="a"), new_pod(6, node="a")], [], {uid(1): ("a",)}, id="on the same node",
        ),
        pytest.param(
            [DEPLOYMENT], [new_pod(5, node="a"), new_pod(6, node="b")], [5], {uid(1): ("b",)},
            id="one has requested its fork",
        ),
        pytest.param(
            [DEPLOYMENT], [new_pod(5, node="a", deleting=True), new_pod(6, node="b")], [], {uid(1): ("b",)},
            id="one is terminating",
        ),
        pytest.param(
            [DEPLOYMENT], [new_pod(5, node="a", containers_ready_at=READY), new_pod(6, node="b")], [],
            {uid(1): ("b",)}, id="one serves",
        ),
        pytest.param(
            [DEPLOYMENT], [new_pod(5, node="a", annotations={names.REJECTED: "why"}), new_pod(6, node="b")], [],
            {uid(1): ("b",)}, id="one never forks",
        ),
        pytest.param(
            [DEPLOYMENT], [new_pod(5, node="a", annotations={names.INJECTED: "1", names.VERSION: "v1"}), new_pod(6)],
            [], {scaleup_id(uid(1), "v1"): ("a",), uid(1): ()}, id="one of another version",
        ),
        pytest.param(
            [LWS], [member(5, "a", node="a"), member(6, "a", node="b"), member(7, "b")], [], {uid(1): ("a", "b")},
            id="all nodes of a group",
        ),
        pytest.param([], [new_pod(5, None, owner=JOB, node="a")], [], {"the-job": ("a",)}, id="a Job's Pod"),
    ],
)  # fmt: skip
def test_nodes_of_bound_pods_are_hosts(
    workloads: Sequence[ObservedWorkload],
    pods: Sequence[ObservedPod],
    known: Sequence[int],
    expected: dict[str, tuple[str, ...]],
) -> None:
    """Nodes of the Pods that are expected to fork, by scale-up."""
    snapshot = PlannerSnapshot(NOW, tuple(instance(uid(number), "loading", chunks=0) for number in known))
    seen = observe(NOW, {one.uid: one for one in pods}, {one.uid: one for one in workloads}, snapshot)
    found = pending_replicas(seen, {}, TTL_S).pending_replicas
    assert expected == {name: one.scaleup.hosts for name, one in found.items()}


def test_the_number_of_announced_hosts_is_bounded() -> None:
    """More Pods than an announcement may name are still all expected."""
    pods = [new_pod(number, node=f"node-{number:04d}") for number in range(MAX_HOSTS + 1)]
    one = workload(1, len(pods))
    (found,) = pending_replicas(
        observe(NOW, {pod.uid: pod for pod in pods}, {one.uid: one}), {}, TTL_S
    ).pending_replicas.values()
    assert MAX_HOSTS == len(found.scaleup.hosts)
    assert MAX_HOSTS + 1 == found.scaleup.replicas


@pytest.mark.parametrize(
    ("hosts", "reported", "expected"),
    [
        pytest.param(("a",), known(3), 3, id="a new host"),
        pytest.param(("a",), known(3, hosts=("a",)), None, id="known"),
        pytest.param(("a", "b"), known(3, hosts=("a",)), 3, id="one is new"),
        pytest.param(("a",), known(3, hosts=("a", "b")), None, id="one is no longer pending"),
        pytest.param(("c",), known(3, hosts=("a", "b")), 3, id="a Pod moved"),
        pytest.param((), known(3, hosts=("a",)), None, id="none is pending"),
        pytest.param(("a",), {}, None, id="the scale-up is unknown"),
        pytest.param(("a",), known(3, 0, "other"), None, id="another model"),
        pytest.param(("a",), known(5, 1), 4, id="the number of replicas differs"),
    ],
)
def test_new_hosts_are_announced(
    hosts: tuple[str, ...], reported: dict[str, ScaleUpInfo], expected: int | None
) -> None:
    """Hosts that the planner does not know are announced at once, with its own number of replicas."""
    found = hosts_to_announce({"a": pending(3, hosts=hosts)}, reported)
    assert ([expected] if expected is not None else []) == [one.scaleup.replicas for one in found]
    assert all(one.scaleup.hosts == hosts for one in found)


@pytest.mark.parametrize(
    ("one", "reported", "before", "expected"),
    [
        (pending(3), known(3), {"a": DOWN}, {}),
        (pending(3), known(4, 1), {}, {}),
        (pending(3), known(4), {}, {"a": ScaleUpMismatch(False, POLLED_AT)}),
        (pending(3), known(4), {"a": DOWN}, {"a": DOWN}),
        (pending(3), known(4), {"a": UP}, {"a": ScaleUpMismatch(False, POLLED_AT)}),
        (pending(3), known(4, 2), {}, {"a": ScaleUpMismatch(True, POLLED_AT)}),
        (None, known(4, 4), {}, {"a": ScaleUpMismatch(False, POLLED_AT)}),
        (None, {}, {"a": DOWN}, {}),
    ],
)
def test_a_mismatch_lasts_while_the_difference_keeps_its_sign(
    one: PendingScaleUp | None,
    reported: dict[str, ScaleUpInfo],
    before: dict[str, ScaleUpMismatch],
    expected: dict[str, ScaleUpMismatch],
) -> None:
    """Since when the difference has had the same sign in every poll."""
    assert expected == find_mismatches({"a": one} if one else {}, reported, ("a",), before, POLLED_AT)


@pytest.mark.parametrize(
    ("before", "pending_count", "reported", "expected"),
    [
        ({"a": 4}, None, {}, 9),
        ({"a": 4}, 5, {}, 4),
        ({}, 5, {}, 0),
        ({"a": 12}, 5, {}, 9),
        ({"a": 4}, 5, known(5), 9),
        (None, 5, {}, 4),
        (None, 5, known(5), 9),
        (None, 5, known(2), 6),
    ],
)
def test_a_new_leader_continues_from_the_reported_sizes(
    before: dict[str, int] | None, pending_count: int | None, reported: dict[str, ScaleUpInfo], expected: int
) -> None:
    """Sizes that were reported or that nothing is expected of; for a new leader, what the planner knows."""
    waited = PendingState({"a": pending(pending_count)} if pending_count is not None else {}, {}, {"a": 9})
    assert {"a": expected} == announced_sizes(before, waited, reported)


def test_only_own_scale_ups_are_withdrawn() -> None:
    """Those that others announced stay, and a withdrawal needs two polls."""
    reported = {
        name: scaleup_view(ScaleUp(scaleup_id=name, model=MODEL, replicas=1)) for name in ("a", "b", "late", "other")
    }
    first = find_mismatches({"a": pending(1)}, reported, ("a", "b", "c"), {}, POLLED_AT - 2)
    differs = find_mismatches({"a": pending(1)}, reported, ("a", "b", "c", "late"), first, POLLED_AT)
    assert ("b",) == to_withdraw({"a": pending(1)}, reported, differs, POLLED_AT)


def test_known_ids_include_those_of_deleted_objects() -> None:
    """The UIDs of workloads, of owners, and of Pods without an owner, deleted ones included."""
    pods = {uid(5): new_pod(5, None, owner=JOB), uid(6): new_pod(6, None)}
    seen = observe(NOW, pods, {uid(1): DEPLOYMENT}, deleted={uid(7): new_pod(7, None)})
    assert {uid(1), "the-job", uid(6), uid(7)} == known_ids(seen)
