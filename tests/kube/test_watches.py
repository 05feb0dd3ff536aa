"""Watches of a real API server, through everything that ends a watch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping

import pytest
from lightkube import Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Node, Pod

from planner.integrations.kubernetes import api_server, names
from planner.integrations.kubernetes.api_server import (
    ApiServer,
    ClusterUnavailable,
    Deleted,
    Document,
    ResourceVersionExpired,
    Synced,
    Upserted,
    WatchEvent,
    open_server,
)
from planner.integrations.kubernetes.cluster import Cluster, ObservedWorkload
from rfork.settings import KubernetesSettings
from tests.kube.control_plane import ControlPlane
from tests.kube.watch_recorder import LABELS, SOON_S, Post, pod, pod_upserted, recording, workload


async def test_pod_changes_are_delivered(cluster: Cluster, admin: Client, namespace: str) -> None:
    """Pods with the label are listed, then each change is delivered; other Pods are never seen."""
    admin.create(pod(namespace, "first"))
    async with recording(cluster.pods()) as recorder:
        listed = await recorder.until(lambda event: isinstance(event, Synced))
        assert isinstance(listed, Synced)
        assert ["first"] == [each.name for each in listed.items if each.namespace == namespace]
        admin.create(pod(namespace, "other", {"app": "other"}))
        admin.create(pod(namespace, "second"))
        await recorder.until(pod_upserted("second", lambda item: item.node is None and item.phase == "Pending"))
        admin.patch(Pod, "second", {"metadata": {"annotations": {"a": "b"}}}, namespace=namespace)
        await recorder.until(pod_upserted("second", lambda item: item.annotations == {"a": "b"}))
        admin.patch(Pod, "first", {"metadata": {"labels": {names.MODEL: None}}}, namespace=namespace)
        await recorder.until(lambda event: isinstance(event, Deleted) and event.item.name == "first")
        admin.delete(Pod, "second", namespace=namespace)
        await recorder.until(lambda event: isinstance(event, Deleted) and event.item.name == "second")
        event_names = [event.item.name for event in recorder.events if not isinstance(event, Synced)]
        assert "other" not in event_names


async def test_parsed_fields_of_a_pod(cluster: Cluster, admin: Client, namespace: str, post: Post) -> None:
    """Its owner, node, gates, conditions, and since when its containers are ready."""
    made = workload("Deployment", "web", 1)
    made["spec"]["template"]["spec"]["readinessGates"] = [{"conditionType": names.WEIGHTS_READY}]
    async with recording(cluster.pods()) as recorder:
        await recorder.until(lambda event: isinstance(event, Synced))
        post(f"/apis/apps/v1/namespaces/{namespace}/deployments", made)
        first_event = await recorder.until(
            lambda event: isinstance(event, Upserted) and event.item.namespace == namespace
        )
        assert isinstance(first_event, Upserted)
        owner = first_event.item.owner
        assert owner is not None
        assert ("ReplicaSet", "apps/v1", namespace) == (owner.kind, owner.api_version, owner.namespace)
        assert (names.WEIGHTS_READY,) == first_event.item.gates
        path = f"/api/v1/namespaces/{namespace}/pods/{first_event.item.name}"
        post(
            f"{path}/binding",
            {"metadata": {"name": first_event.item.name}, "target": {"kind": "Node", "name": "somewhere"}},
        )
        ready = {"type": "ContainersReady", "status": "True", "lastTransitionTime": "2026-01-01T00:00:10Z"}
        status = {"phase": "Running", "conditions": [ready]}
        admin.patch(Pod.Status, first_event.item.name, {"status": status}, namespace=namespace)
        last = await recorder.until(pod_upserted(first_event.item.name, lambda item: item.phase == "Running"))
        assert isinstance(last, Upserted)
        assert ("somewhere", 1767225610.0) == (last.item.node, last.item.containers_ready_at)
        assert last.item.conditions["ContainersReady"]


async def test_workloads_are_observed(cluster: Cluster, admin: Client, namespace: str, post: Post) -> None:
    """Each kind with its replicas and its template's metadata, including changes and deletions."""
    apps = f"/apis/apps/v1/namespaces/{namespace}"
    post(f"{apps}/deployments", workload("Deployment", "web", 3))
    post(f"{apps}/statefulsets", workload("StatefulSet", "db", 0))
    async with recording(cluster.workloads("StatefulSet")) as recorder:
        await recorder.until(lambda event: own_workloads(event, namespace) == [("StatefulSet", "db", 0)])
    async with recording(cluster.workloads("Deployment")) as recorder:
        await recorder.until(lambda event: own_workloads(event, namespace) == [("Deployment", "web", 3)])
        admin.patch(Deployment, "web", {"spec": {"replicas": 5}}, namespace=namespace)
        scaled = await recorder.until(lambda event: own_workloads(event, namespace) == [("Deployment", "web", 5)])
        assert isinstance(scaled, Upserted)
        assert {"app": "web", **LABELS} == scaled.item.template_labels
        assert {names.ENGINE: "pytorch"} == scaled.item.template_annotations
        admin.delete(Deployment, "web", namespace=namespace)
        await recorder.until(lambda event: isinstance(event, Deleted) and event.item.name == "web")


async def test_a_missing_kind_counts_as_empty_until_it_exists(
    cluster: Cluster, namespace: str, post: Post, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LeaderWorkerSets are observed once the kind exists."""
    monkeypatch.setattr(api_server, "RECHECK_S", 0.5)
    lws = workload("LeaderWorkerSet", "big", 2)
    lws |= {"apiVersion": "leaderworkerset.x-k8s.io/v1"}
    group = {"size": 2, "workerTemplate": {"metadata": {"labels": LABELS}}}
    lws["spec"] = {"replicas": 2, "leaderWorkerTemplate": group}
    async with recording(cluster.workloads("LeaderWorkerSet")) as recorder:
        await recorder.until(lambda event: event == Synced(()))
        post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", lws_definition())
        try:
            await asyncio.to_thread(created_soon, post, namespace, lws)
            await recorder.until(lambda event: own_workloads(event, namespace) == [("LeaderWorkerSet", "big", 2)])
        finally:
            admin.delete(CustomResourceDefinition, "leaderworkersets.leaderworkerset.x-k8s.io")


def own_workloads(event: WatchEvent[ObservedWorkload], namespace: str) -> list[tuple[str, str, int]]:
    """Return the kind, name and replicas of the namespace's workloads in the event."""
    items = event.items if isinstance(event, Synced) else (event.item,)
    return sorted((each.kind, each.name, each.replicas) for each in items if each.namespace == namespace)


def created_soon(post: Post, namespace: str, lws: Document) -> None:
    """Create an object of a kind that was just defined."""
    deadline = time.monotonic() + SOON_S
    while True:
        try:
            post(f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets", lws)
            return
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def lws_definition() -> Document:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "metadata": {
            "name": "leaderworkersets.leaderworkerset.x-k8s.io",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": "leaderworkerset.x-k8s.io",
            "scope": "Namespaced",
            "names": {"plural": "leaderworkersets", "singular": "leaderworkerset", "kind": "LeaderWorkerSet"},
            "versions": [version],
        },
    }


async def test_nodes_are_observed(cluster: Cluster, admin: Client, namespace: str) -> None:
    """With their labels, including deletions."""
    async with recording(cluster.nodes()) as recorder:
        await recorder.until(lambda event: isinstance(event, Synced))
        admin.create(Node(metadata=ObjectMeta(name=namespace, labels={"zone": "a"})))
        await recorder.until(
            lambda event: (
                isinstance(event, Upserted) and (event.item.name, event.item.labels["zone"]) == (namespace, "a")
            )
        )
        admin.delete(Node, namespace)
        await recorder.until(lambda event: isinstance(event, Deleted) and event.item.name == namespace)


async def test_watches_survive_a_crash_of_the_api_server(
    cluster: Cluster, plane: ControlPlane, admin: Client, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After a SIGKILL and a compaction everything is listed again, then watched as before."""
    admin.create(pod(namespace, "before"))
    async with recording(cluster.pods()) as pods, recording(cluster.workloads("Deployment")) as workloads:
        await pods.until(lambda event: isinstance(event, Synced))
        await workloads.until(lambda event: isinstance(event, Synced))
        known = len(pods.events), len(workloads.events)
        await asyncio.to_thread(plane.kill_api_server)
        try:
            with pytest.raises(ClusterUnavailable, match=r"^GET /apis/coordination"):
                await cluster.read_lease("none", namespace)
            await asyncio.to_thread(plane.compact)
        finally:
            await asyncio.to_thread(plane.start_api_server)
        again = await pods.until(lambda event: isinstance(event, Synced), after=known[0])
        assert isinstance(again, Synced)
        assert ["before"] == [each.name for each in again.items if each.namespace == namespace]
        await workloads.until(lambda event: isinstance(event, Synced), after=known[1])
        admin.create(pod(namespace, "after"))
        await pods.until(pod_upserted("after"))
    messages = [record.getMessage() for record in caplog.records if "of=pods" in record.getMessage()]
    assert len(set(messages)) == len(messages)


class CompactedClient(ApiServer):
    """Starts its first watch at a revision that was compacted long ago."""

    watches = 0

    async def watch(
        self, path: str, parameters: Mapping[str, str], *, silence_s: float
    ) -> AsyncGenerator[Document, None]:
        self.watches += 1
        watch_parameters = {**parameters, "resourceVersion": "1"} if self.watches == 1 else parameters
        async for event in super().watch(path, watch_parameters, silence_s=silence_s):
            yield event


async def test_an_expired_version(plane: ControlPlane, admin: Client, namespace: str) -> None:
    """After a 410 everything is listed again, and the watch continues from there."""
    await asyncio.to_thread(plane.compact)
    settings = KubernetesSettings(kubeconfig=plane.kubeconfig, namespace=namespace)
    server = open_server(settings)
    with pytest.raises(ResourceVersionExpired):
        await server.call("GET", "/api/v1/pods", parameters={"resourceVersion": "999999999"})
    compacted_client = CompactedClient(server._client)
    async with recording(Cluster(compacted_client).nodes()) as recorder:
        await recorder.until(lambda event: isinstance(event, Synced))
        await recorder.until(lambda event: isinstance(event, Synced), after=1)
        admin.create(Node(metadata=ObjectMeta(name=namespace)))
        await recorder.until(lambda event: isinstance(event, Upserted) and event.item.name == namespace)
        admin.delete(Node, namespace)
    assert 2 == compacted_client.watches
    await server.close()


async def test_a_silent_connection(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that is silent for longer than the server's timeout counts as dead."""
    monkeypatch.setattr(api_server, "SILENCE_S", 0.2)
    async with recording(cluster.nodes()) as recorder:
        for again in range(3):
            await recorder.until(lambda event: isinstance(event, Synced), after=again)


async def test_a_watch_that_ends_normally_continues(
    cluster: Cluster, admin: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends each watch after a while, which causes no new list."""
    monkeypatch.setattr(api_server, "WATCH_S", 1)
    monkeypatch.setattr(api_server, "MIN_WATCH_S", 0.1)
    async with recording(cluster.pods()) as recorder:
        await recorder.until(lambda event: isinstance(event, Synced))
        await asyncio.sleep(2.5)  # for the duration of two watches
        admin.create(pod(namespace, "late"))
        await recorder.until(pod_upserted("late"))
        assert 1 == sum(isinstance(event, Synced) for event in recorder.events)
