"""The client of the integrations with a real API server: rights, Pods, Events, Leases, and an election."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
from lightkube import Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Event, Pod, ServiceAccount

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import ClusterUnavailable, NotFound, ResourceConflict, Synced
from planner.integrations.kubernetes.cluster import WORKLOAD_PATHS, Cluster, connect
from planner.integrations.kubernetes.leader_election import LeaderElection, LeaderWatch
from rfork.asyncio_timeout import timeout
from rfork.settings import KubernetesSettings
from tests.kube.control_plane import ControlPlane
from tests.kube.watch_recorder import SOON_S, Post, observe_pod, pod, pod_upserted, recording

RULES = [
    (("",), ("pods",), ("list", "watch")),
    (("",), ("pods/status",), ("patch",)),
    (("",), ("nodes",), ("list", "watch")),
    (("",), ("events",), ("create", "patch")),
    (("apps",), ("deployments", "statefulsets"), ("list", "watch")),
    (("leaderworkerset.x-k8s.io",), ("leaderworkersets",), ("list", "watch")),
    (("coordination.k8s.io",), ("leases",), ("get", "create", "update")),
]


@pytest.fixture
async def other(plane: ControlPlane, namespace: str) -> AsyncIterator[Cluster]:
    """The cluster through another client."""
    made = connect(KubernetesSettings(kubeconfig=plane.kubeconfig, namespace=namespace))
    yield made
    await made.close()


async def test_the_documented_role_is_sufficient(
    plane: ControlPlane, admin: Client, namespace: str, post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    """Without rights, one log line has the reason and nothing is raised; the documented rights are enough."""
    admin.create(ServiceAccount(metadata=ObjectMeta(name="integration", namespace=namespace)))
    settings = KubernetesSettings(kubeconfig=plane.kubeconfig_for(namespace, "integration"), namespace=namespace)
    cluster = connect(settings)
    user = f"system:serviceaccount:{namespace}:integration"
    async with recording(cluster.pods()) as recorder:
        with pytest.raises(ClusterUnavailable, match=r"403 .* is forbidden"):
            await cluster.read_lease("none", namespace)
        await asyncio.sleep(2)  # retries meanwhile
        assert [] == recorder.events
        event = "watch of Kubernetes objects failed, retrying resource=pods"
        assert 1 == sum(event in record.getMessage() for record in caplog.records)
        assert {403} == {call.code for call in plane.calls(user)}
        refused = len(plane.calls(user))
        rules = [{"apiGroups": list(a), "resources": list(b), "verbs": list(c)} for a, b, c in RULES]
        rbac = "/apis/rbac.authorization.k8s.io/v1"
        post(f"{rbac}/clusterroles", {"metadata": {"name": namespace}, "rules": rules})
        subject = {"kind": "ServiceAccount", "name": "integration", "namespace": namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": namespace}
        binding = {"metadata": {"name": namespace}, "roleRef": role, "subjects": [subject]}
        post(f"{rbac}/clusterrolebindings", binding)
        admin.create(pod(namespace, "mine"))
        await recorder.until(
            lambda event: pod_upserted("mine")(event) or (isinstance(event, Synced) and any(event.items))
        )
    mine = await observe_pod(cluster, namespace, "mine")
    await cluster.annotate(mine, {"a": "b"})
    await cluster.set_condition(mine, names.WEIGHTS_READY, status=True, reason="Forked", message="")
    await cluster.emit_event(mine.ref, "Normal", "Forked", "once")
    await cluster.emit_event(mine.ref, "Normal", "Forked", "once")
    lease = await cluster.write_lease("it", namespace, "me", 15, "")
    await cluster.write_lease("it", namespace, None, 15, lease.version)
    for kind in WORKLOAD_PATHS:
        async with recording(cluster.workloads(kind)) as workloads:
            await workloads.until(lambda each: isinstance(each, Synced))
    async with recording(cluster.nodes()) as nodes:
        await nodes.until(lambda each: isinstance(each, Synced))
    await cluster.close()
    late = [call for call in plane.calls(user)[refused:] if call.resource != "pods" or call.verb != "list"]
    assert [] == [call for call in late if call.code == 403]


async def test_equal_events_are_incremented(cluster: Cluster, other: Cluster, admin: Client, namespace: str) -> None:
    """An equal Event of any replica is the same object; after its deletion a new one is created."""
    admin.create(pod(namespace, "mine"))
    mine = await observe_pod(cluster, namespace, "mine")

    def events() -> list[tuple[str | None, str | None, int | None]]:
        found = [each for each in admin.list(Event, namespace=namespace) if each.involvedObject.kind == "Pod"]
        return sorted((each.reason, each.message, each.count) for each in found)

    for event_client in (cluster, cluster, other):
        await event_client.emit_event(mine.ref, "Normal", "Forked", "15.2 GB")
    await cluster.emit_event(mine.ref, "Warning", "FellBack", "x" * 5000)
    assert [("FellBack", "x" * 999 + "…", 1), ("Forked", "15.2 GB", 3)] == events()
    for event in admin.list(Event, namespace=namespace):
        assert "rfork.dev/controller" == event.reportingComponent
        assert mine.uid == event.involvedObject.uid
        if event.reason == "FellBack" and event.metadata:
            admin.delete(Event, str(event.metadata.name), namespace=namespace)
    await asyncio.gather(
        *(event_client.emit_event(mine.ref, "Warning", "FellBack", "x" * 5000) for event_client in (cluster, other))
    )
    assert [("FellBack", "x" * 999 + "…", 2), ("Forked", "15.2 GB", 3)] == events()
    await cluster.emit_event(dataclasses.replace(mine.ref, kind="Node", namespace=""), "Normal", "Seen", namespace)


async def test_conditions_and_annotations(cluster: Cluster, admin: Client, namespace: str) -> None:
    """A condition keeps the time of its last transition; data of others stays as it is."""
    theirs = {"type": "example.com/theirs", "status": "True"}
    admin.create(pod(namespace, "mine"))
    admin.patch(Pod.Status, "mine", {"status": {"conditions": [theirs]}}, namespace=namespace)
    admin.patch(Pod, "mine", {"metadata": {"annotations": {"theirs": "1"}}}, namespace=namespace)

    def condition() -> tuple[str, str | None, str | None, object]:
        status = admin.get(Pod, "mine", namespace=namespace).status
        (each,) = [each for each in (status.conditions if status else None) or [] if each.type == "ours"]
        return each.status, each.reason, each.message, each.lastTransitionTime

    mine = await observe_pod(cluster, namespace, "mine")
    await cluster.annotate(mine, {"a": "1", "b": "2"})
    await cluster.annotate(mine, {"a": None, "b": "3", "c": None})
    await cluster.set_condition(mine, "ours", status=False, reason="Waits", message="one")
    first = condition()
    assert ("False", "Waits", "one") == first[:3]
    assert first[3] is not None
    mine = await observe_pod(cluster, namespace, "mine")
    assert {"theirs": "1", "b": "3"} == mine.annotations
    assert {"example.com/theirs": True, "ours": False} == mine.conditions
    await cluster.set_condition(mine, "ours", status=False, reason="Waits", message="two")
    assert ("False", "Waits", "two", first[3]) == condition()
    await cluster.set_condition(mine, "ours", status=True, reason="Ready", message="")
    assert ("True", "Ready", None) == condition()[:3]
    assert {"example.com/theirs": True, "ours": True} == (await observe_pod(cluster, namespace, "mine")).conditions


async def test_annotations_are_written_through_the_status_subresource(
    cluster: Cluster, admin: Client, namespace: str
) -> None:
    """It accepts annotations; the image and the rest of the spec do not change."""
    made = admin.create(pod(namespace, "mine"))
    mine = await observe_pod(cluster, namespace, "mine")
    await cluster.annotate(mine, {"a": "1", "b": "2"})
    await cluster.annotate(mine, {"a": None})
    assert {"b": "2"} == (await observe_pod(cluster, namespace, "mine")).annotations
    meddling = {
        "metadata": {"annotations": {"b": "3"}},
        "spec": {
            "activeDeadlineSeconds": 1,
            "containers": [{"name": "engine", "image": "evil"}],
            "tolerations": [{"operator": "Exists"}],
        },
    }
    after = admin.patch(Pod.Status, "mine", meddling, namespace=namespace)
    assert after.metadata is not None
    assert (made.spec, {"b": "3"}) == (after.spec, after.metadata.annotations)
    assert made.spec == admin.get(Pod, "mine", namespace=namespace).spec


async def test_the_webhook_observes_the_leader(
    plane: ControlPlane, cluster: Cluster, admin: Client, namespace: str, post: Post
) -> None:
    """With the right to get one Lease, from the leader's first renewals until its release."""
    admin.create(ServiceAccount(metadata=ObjectMeta(name="webhook", namespace=namespace)))
    settings = KubernetesSettings(
        kubeconfig=plane.kubeconfig_for(namespace, "webhook"),
        namespace=namespace,
        lease="it",
        lease_duration_s=5,
        poll_interval_s=0.2,
    )
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": ["it"]}
    post(f"{rbac}/roles", {"metadata": {"name": "webhook"}, "rules": [{**leases, "verbs": ["get"]}]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "webhook"}
    subject = {"kind": "ServiceAccount", "name": "webhook", "namespace": namespace}
    binding = {"metadata": {"name": "webhook"}, "roleRef": role, "subjects": [subject]}
    post(f"{rbac}/rolebindings", binding)
    leading, own = LeaderWatch(settings), connect(settings)
    watch_task = asyncio.create_task(leading.follow(own))
    election = LeaderElection(cluster, "it", namespace, "a", 5.0)

    async def act() -> None:
        await asyncio.Event().wait()

    async def until(expected: bool) -> None:
        while leading() is not expected:
            await asyncio.sleep(0.1)

    assert not leading()
    controller = asyncio.create_task(election.run(act))
    try:
        async with timeout(SOON_S):
            await until(True)
            controller.cancel()
            await until(False)
    finally:
        watch_task.cancel()
        await asyncio.gather(watch_task, controller, return_exceptions=True)
        await own.close()
    calls = plane.calls(f"system:serviceaccount:{namespace}:webhook")
    assert {("get", "leases", "it")} == {(call.verb, call.resource, call.name) for call in calls}
    assert 200 in {call.code for call in calls}


async def test_a_deleted_pod(cluster: Cluster, admin: Client, namespace: str) -> None:
    """Another Pod of the same name is not changed."""
    admin.create(pod(namespace, "mine"))
    mine = await observe_pod(cluster, namespace, "mine")
    for other in (
        dataclasses.replace(mine, uid="00000000-0000-0000-0000-000000000000"),
        dataclasses.replace(mine, name="unknown"),
    ):
        with pytest.raises(NotFound):
            await cluster.annotate(other, {"a": "1"})
        with pytest.raises(NotFound):
            await cluster.set_condition(other, "ours", status=True, reason="Ready", message="")
    assert {} == (await observe_pod(cluster, namespace, "mine")).annotations


async def test_two_clients_of_one_lease(cluster: Cluster, other: Cluster, namespace: str) -> None:
    """A write with an outdated version is a conflict."""
    assert "" == (await cluster.read_lease("it", namespace)).version
    first = await cluster.write_lease("it", namespace, "a", 14.2, "")
    assert ("a", 15.0) == (first.holder, first.duration_s)
    with pytest.raises(ResourceConflict):
        await other.write_lease("it", namespace, "b", 15, "")
    assert first == await other.read_lease("it", namespace)
    second = await cluster.write_lease("it", namespace, "a", 15, first.version)
    assert second.renewed != first.renewed
    with pytest.raises(ResourceConflict):
        await other.write_lease("it", namespace, "b", 15, first.version)
    assert (await cluster.write_lease("it", namespace, None, 15, second.version)).holder is None
    free = await other.read_lease("it", namespace)
    assert "b" == (await other.write_lease("it", namespace, "b", 15, free.version)).holder
    with pytest.raises(ClusterUnavailable):
        await other.write_lease("it", "no-such-namespace", "b", 15, "")


async def test_an_election(cluster: Cluster, other: Cluster, namespace: str) -> None:
    """One of two processes leads; when it stops, the other one leads."""
    led: asyncio.Queue[str] = asyncio.Queue()

    async def act(name: str) -> None:
        led.put_nowait(name)
        await asyncio.Event().wait()

    elections = {
        name: LeaderElection(client, "it", namespace, name, 5.0) for name, client in (("a", cluster), ("b", other))
    }
    tasks = {"a": asyncio.create_task(elections["a"].run(lambda: act("a")))}
    async with timeout(SOON_S):
        assert "a" == await led.get()
        tasks["b"] = asyncio.create_task(elections["b"].run(lambda: act("b")))
        await asyncio.sleep(6)  # longer than the Lease's duration
        assert (True, False, True) == (elections["a"].is_leader, elections["b"].is_leader, led.empty())
        tasks["a"].cancel()
        assert "b" == await led.get()
    tasks["b"].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert (await cluster.read_lease("it", namespace)).holder is None
