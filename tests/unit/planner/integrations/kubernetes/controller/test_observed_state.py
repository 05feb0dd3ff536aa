"""The observed state: instances, forks, Pods and workloads joined by their ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import Deleted, Synced, Upserted, WatchEvent
from planner.integrations.kubernetes.cluster import ObjectRef, ObservedPod
from planner.integrations.kubernetes.controller import observed_state
from planner.integrations.kubernetes.controller.observed_state import (
    DELETED_TTL_S,
    OwnerIndex,
    PlannerSnapshot,
    PodCache,
    ResourceCache,
    all_ranks,
    format_size,
    observe,
    pod_uid,
    pods_of_replica,
)
from rfork.schema import Rank
from tests.unit.planner.integrations.kubernetes.fake_cluster import pod, uid, workload
from tests.unit.planner.integrations.kubernetes.fake_planner_api import fork, instance

ODD = "static-pod-of-node-1"


@pytest.mark.parametrize(
    ("instance_id", "expected"),
    [
        (f"{uid(5)}-main-tp0of1-pp0of1-ep0of1-dp0-00", uid(5)),
        (f"{uid(9)}-main-tp0of1-pp0of1-ep0of1-dp0-00", None),
        (f"{ODD}-main-tp0of1-pp0of1-ep0of1-dp0-00", ODD),
        (uid(5), None),
        ("nothing", None),
        ("", None),
    ],
)
def test_instance_ids_map_to_pod_uids(instance_id: str, expected: str | None) -> None:
    """The id begins with the UID of its Pod, and a dash."""
    assert expected == pod_uid(instance_id, {uid(5): pod(5)}, {ODD: pod(6)})


def test_instances_and_forks_are_joined_with_their_pods() -> None:
    """Deleted Pods are included; the rest are unmatched."""
    views = [instance(uid(5)), instance(uid(5), start="11"), instance(uid(6)), instance(uid(7))]
    ended = fork(uid(5), "forked")
    found = observe(1.0, {uid(5): pod(5)}, {}, PlannerSnapshot(1.0, tuple(views), (ended,)), deleted={uid(6): pod(6)})
    assert {uid(5): tuple(views[:2]), uid(6): (views[2],)} == found.instances
    assert {uid(5): (ended,)} == found.forks
    assert (views[3],) == found.unmatched_instances


def test_images_of_holders_belong_to_no_pod() -> None:
    """A holder that prefetches in an engine's Pod is not the engine: the Pod has not arrived."""
    one = pod(5)
    image = instance(one.uid, "loading", chunks=0, holder="holder-1")
    seen = observe(1000.0, {one.uid: one}, snapshot=PlannerSnapshot(1000.0, (image,), (fork(one.uid, chunks=10),)))
    assert not seen.has_reported(one)
    assert (image,) == seen.unmatched_instances


@pytest.mark.parametrize(
    ("labels", "annotations", "ranks", "expected"),
    [
        ({}, {}, [Rank()], True),
        ({}, {}, [Rank(tp=0, tp_size=2)], False),
        ({}, {}, [Rank(tp=0, tp_size=2), Rank(tp=0, tp_size=2, dp=1)], False),
        ({}, {}, [Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)], True),
        ({}, {}, [Rank(), Rank(tp=0, tp_size=2, role="speculative")], False),
        ({names.LWS_GROUP: "a"}, {}, [Rank(tp=0, tp_size=2)], True),
        ({}, {names.REPLICA_PODS: "2"}, [Rank(tp=0, tp_size=2)], True),
    ],
)
def test_all_ranks_are_known_only_of_a_complete_replica(
    labels: dict[str, str], annotations: dict[str, str], ranks: list[Rank], expected: bool
) -> None:
    """Known only if the Pod is a complete replica."""
    assert expected == all_ranks(pod(5, labels=labels, annotations=annotations), ranks)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(15_200_000_000, "15.2 GB"), (2e12, "2.0 TB"), (1_000_000, "1.0 MB"), (0, "0.0 kB")],
)
def test_sizes_are_shown_in_decimal_units(nbytes: float, expected: str) -> None:
    """In decimal units."""
    assert expected == format_size(nbytes)


DEPLOYMENT = workload(1)
SET = workload(2, kind="StatefulSet")
LWS = workload(3, kind="LeaderWorkerSet")
LWS_LABEL = "leaderworkerset.sigs.k8s.io/name"
FOREIGN = ObjectRef("StatefulSet", "apps/v1", "default", "serve-3-0", "unknown")


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (pod(5, DEPLOYMENT), "serve-1"),
        (pod(5, DEPLOYMENT, namespace="other"), None),
        (replace(pod(5, DEPLOYMENT), labels={}), None),
        (pod(5, workload(4)), None),
        (pod(5, SET), "serve-2"),
        (pod(5, labels={LWS_LABEL: "serve-3"}, owner=FOREIGN), "serve-3"),
        (pod(5, labels={LWS_LABEL: "gone"}, owner=FOREIGN), None),
        (pod(5), None),
    ],
)
def test_the_workload_of_a_pod_is_found_by_owner_or_label(one: ObservedPod, expected: str | None) -> None:
    """By the ReplicaSet's name for Deployments, by the label for LeaderWorkerSets, else by the owner."""
    found = OwnerIndex((DEPLOYMENT, SET, LWS)).of(one)
    assert expected == (found.name if found else None)


@pytest.mark.parametrize(
    ("annotation", "expected"), [(None, 1), ("2", 2), ("0", 1), ("-1", 1), ("two", 1), ("²", 1), ("99999", 1)]
)
def test_an_invalid_number_of_pods_counts_as_one(annotation: str | None, expected: int) -> None:
    """An invalid number counts as one."""
    annotations = {names.REPLICA_PODS: annotation} if annotation is not None else {}
    assert expected == pods_of_replica(workload(1, template_annotations=annotations))


@pytest.mark.parametrize(
    ("kubelet_ready_at", "observed_ready_at", "expected"),
    [
        pytest.param(None, None, None, id="not ready"),
        pytest.param(990.0, 992.0, 10.0, id="equal clocks"),
        pytest.param(990.0, None, 10.0, id="a restarted controller"),
        pytest.param(4600.0, 992.0, 8.0, id="the node's clock is an hour ahead"),
        pytest.param(4600.0, None, 0.0, id="ahead, and not observed before"),
        pytest.param(-2600.0, 992.0, 900.0, id="the node's clock is an hour behind"),
        pytest.param(990.0, 1001.0, 10.0, id="the controller's clock was set back"),
    ],
)
def test_the_later_measurement_of_readiness_counts(
    kubelet_ready_at: float | None, observed_ready_at: float | None, expected: float | None
) -> None:
    """The maximum of the node's and the controller's measurement; never negative."""
    one = pod(5, containers_ready_at=kubelet_ready_at)
    seen = observe(1000.0, {one.uid: one}, ready={one.uid: observed_ready_at} if observed_ready_at is not None else {})
    assert expected == seen.ready_s(one)


def test_the_start_of_readiness_is_remembered() -> None:
    """Since the first observation; again after the kubelet reported not ready."""
    cache, found = PodCache(), list[dict[str, float]]()
    ready, again = pod(5, containers_ready_at=50.0), pod(5, containers_ready_at=60.0)
    updates: list[WatchEvent[ObservedPod]] = [
        Synced((pod(5),)), Upserted(ready), Upserted(ready), Synced((ready,)), Upserted(again), Upserted(pod(5)),
        Upserted(again), Deleted(again), Upserted(again), Synced(()),
    ]  # fmt: skip
    for now, update in enumerate(updates):
        cache.apply(update, float(now))
        found.append(dict(cache.ready))
    one = uid(5)
    assert [{}, *[{one: 1.0}] * 3, {one: 4.0}, {}, {one: 6.0}, {}, {one: 8.0}, {}] == found


def test_watch_events_update_the_cache() -> None:
    """Objects that were removed, or are missing from a new list, are remembered as deleted for a while."""
    cache: ResourceCache[ObservedPod] = ResourceCache()
    before = cache.listed
    cache.apply(Synced((pod(5), pod(6))), 0.0)
    cache.apply(Upserted(pod(7)), 1.0)
    cache.apply(Deleted(pod(7)), 2.0)
    cache.apply(Synced((pod(6, phase="Running"),)), 3.0)
    assert not before
    assert cache.listed
    assert {uid(6): pod(6, phase="Running")} == cache.items
    assert {uid(7): (pod(7), 2.0), uid(5): (pod(5), 3.0)} == cache.deleted
    cache.apply(Synced((pod(5),)), 3.0 + DELETED_TTL_S)
    assert {uid(6)} == set(cache.deleted)


def test_a_pod_whose_label_came_back_is_not_deleted() -> None:
    """Removing the label looks like a deletion to a watch by label."""
    cache: ResourceCache[ObservedPod] = ResourceCache()
    cache.apply(Synced((pod(5),)), 0.0)
    cache.apply(Deleted(pod(5)), 1.0)
    cache.apply(Upserted(pod(5)), 2.0)
    assert {} == cache.deleted


def test_only_a_limited_number_of_deleted_pods_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped first."""
    monkeypatch.setattr(observed_state, "MAX_DELETED", 2)
    cache: ResourceCache[ObservedPod] = ResourceCache()
    cache.apply(Synced(tuple(map(pod, (5, 6, 7, 8)))), 0.0)
    cache.apply(Deleted(pod(8)), 1.0)
    cache.apply(Synced((pod(7),)), 2.0)
    assert [uid(5), uid(6)] == list(cache.deleted)
