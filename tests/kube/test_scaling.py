"""The complete cycle with real processes and bytes: scale, inject, plan, fork, ready, Events.

Starting processes is slow, so one test covers the life of a Deployment and checks everything on the way. The
others cover outages and rejections.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

import httpx
import pytest
from lightkube import Client
from lightkube.models.core_v1 import Container
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Event, Pod
from lightkube.resources.rbac_authorization_v1 import ClusterRole, Role
from prometheus_client.parser import text_string_to_metric_families

from planner.integrations.kubernetes import names
from tests.kube.control_plane import AuditedCall, ControlPlane
from tests.kube.installation import Component, Installation, installed
from tests.kube.kubelet import Kubelet
from tests.kube.test_kubelet import until

SERVER: Final = Path(__file__).with_name("model_server.py")
PORT: Final = 18080
MEBIBYTES: Final = 32
NODES: Final = {
    "node-a": {"topology.kubernetes.io/zone": "z1", "topology.kubernetes.io/rack": "r1"},
    "node-b": {"topology.kubernetes.io/zone": "z1", "topology.kubernetes.io/rack": "r2"},
}


@pytest.fixture
def fleet(plane: ControlPlane, admin: Client, helm: Path, namespace: str, tmp_path: Path) -> Iterator[Installation]:
    """The chart, with a planner that waits long enough to batch processes on a busy machine."""
    with installed(plane, admin, helm, namespace, tmp_path) as made:
        made.values["planner"]["settings"] = {"scaleup_wait_s": 4}
        made.start("planner")
        yield made


def deployment(name: str, replicas: int, command: list[str], **annotations: str) -> Deployment:
    """Return a Deployment whose Pods run a command. Keywords are annotations: `model_name` is model-name."""
    labels = {"app": name, names.MODEL: name}
    pod_annotations = {f"{names.PREFIX}{key.replace('_', '-')}": value for key, value in annotations.items()}
    container = {
        "name": "server",
        "image": "none",
        "command": command,
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}},
    }
    return cast(
        Deployment,
        Deployment.from_dict(
            {
                "metadata": {"name": name, "labels": labels},
                "spec": {
                    "replicas": replicas,
                    "selector": {"matchLabels": {"app": name}},
                    "template": {
                        "metadata": {"labels": labels, "annotations": pod_annotations},
                        "spec": {"terminationGracePeriodSeconds": 5, "containers": [container]},
                    },
                },
            }
        ),
    )


def server(name: str, replicas: int, *, seconds: float = 0.0, **annotations: str) -> Deployment:
    """Return a Deployment of servers that fork themselves."""
    command = [sys.executable, str(SERVER), str(PORT), str(MEBIBYTES), str(seconds)]
    return deployment(name, replicas, command, engine="pytorch", **annotations)


class NamespaceView:
    """View of the test's namespace."""

    def __init__(self, admin: Client, namespace: str) -> None:
        self._admin, self._namespace = admin, namespace

    def pods(self) -> list[Pod]:
        """Return the Pods that are not terminating."""
        found = self._admin.list(Pod, namespace=self._namespace)
        return [pod for pod in found if pod.metadata and not pod.metadata.deletionTimestamp]

    def ready(self) -> list[str]:
        """Return the names of the Ready Pods."""
        return [
            str(pod.metadata.name)
            for pod in self.pods()
            if pod.metadata and pod.status
            for condition in pod.status.conditions or ()
            if (condition.type, condition.status) == ("Ready", "True")
        ]

    def annotations(self, app: str) -> list[dict[str, str]]:
        """Return the annotations of one Deployment's Pods."""
        metadata = [pod.metadata for pod in self.pods() if pod.metadata]
        return [each.annotations or {} for each in metadata if (each.labels or {}).get("app") == app]

    def events(self, reason: str) -> list[tuple[str, str]]:
        """Return all Events with that reason: the object's name and the message."""
        found = self._admin.list(Event, namespace=self._namespace)
        return [(str(event.involvedObject.name), str(event.message)) for event in found if event.reason == reason]

    def digests(self) -> set[str]:
        """Return the weight digests reported by the servers."""
        found: set[str] = set()
        for pod in self.pods():
            address = pod.status.podIP if pod.status else None
            found.add(httpx.get(f"http://{address}:{PORT}/digest", timeout=10).json()["digest"])
        return found


@pytest.mark.slow
def test_a_deployment_scales_by_forking(
    fleet: Installation, plane: ControlPlane, admin: Client, namespace: str, tmp_path: Path
) -> None:
    """1 to 4: one plan for three forks, equal bytes, Events; back to 1: removed Pods' instances are removed."""
    fleet.start("controller")
    fleet.start("webhook")
    until(lambda: "a controller leads" in fleet.log("webhook"), "Pods with a readiness gate")
    seen = NamespaceView(admin, namespace)
    with Kubelet(plane, namespace, tmp_path / "pods", nodes=NODES), fleet.client() as planner:
        admin.create(server("llama", 1), namespace=namespace)
        until(lambda: len(seen.ready()) == 1, "the first Pod to be ready")
        (first,) = seen.ready()
        assert {"two": 0, "three or four": 0} == plan_batch_counts(planner)

        scale(admin, namespace, "llama", 4)
        until(lambda: len(seen.ready()) == 4, "the other Pods to be ready")
        assert {"two": 0, "three or four": 1} == plan_batch_counts(planner)
        assert 1 == len(seen.digests())

        assert [names.WEIGHTS_READY] * 4 == [
            gate.conditionType for pod in seen.pods() if pod.spec for gate in pod.spec.readinessGates or ()
        ]
        annotations = seen.annotations("llama")
        assert ({"z1"}, {"r1", "r2"}) == (
            {each[names.ZONE] for each in annotations},
            {each[names.RACK] for each in annotations},
        )
        assert {names.INJECTED} <= set.intersection(*(set(each) for each in annotations))
        views = planner.get("/v1/instances").json()["items"]
        assert {f"{namespace}/{pod.metadata.name}" for pod in seen.pods() if pod.metadata} == {
            view["report"]["placement"]["pod"] for view in views
        }

        until(lambda: len(seen.events("Forked")) == 3, "Events of three forks")
        assert all("forked 33.6 MB from" in message for _, message in seen.events("Forked"))
        assert first not in dict(seen.events("Forked"))
        assert ("llama", "3 replicas are expected: they fork from 1 seed") in seen.events("ScaleUp")
        until(lambda: all(deletion_cost(pod) for pod in seen.pods()), "deletion costs of all seeds")

        scale(admin, namespace, "llama", 1)
        until(lambda: len(planner.get("/v1/instances").json()["items"]) == 1, "instances of deleted Pods to be removed")
        until(lambda: len(seen.pods()) == 1, "one Pod")
    fleet.stop()  # the audit log has a watch only once it has ended
    for component, spare in UNUSED_RULES.items():
        rights = granted_rules(admin, fleet, component)
        calls = used_rules(plane, fleet, component, namespace)
        assert (set(), spare) == (calls - rights, rights - calls)


def test_pods_start_without_webhook_or_planner(
    fleet: Installation, plane: ControlPlane, admin: Client, namespace: str, tmp_path: Path
) -> None:
    """Without the webhook a Pod starts unchanged, without the planner it loads from storage; both with an
    Event.
    """
    fleet.start("controller")
    fleet.start("webhook")
    seen = NamespaceView(admin, namespace)
    fleet.kill("webhook")
    with Kubelet(plane, namespace, tmp_path / "pods", nodes=NODES):
        admin.create(deployment("plain", 1, [*OK_SERVER_COMMAND, str(PORT)]), namespace=namespace)
        until(lambda: len(seen.ready()) == 1, "the unchanged Pod to be ready")
        until(lambda: bool(seen.events("WebhookBypassed")), "the Event about the bypassed webhook")
        admin.delete(Deployment, "plain", namespace=namespace)

        fleet.start("webhook")
        fleet.kill("planner")
        admin.create(server("alone", 1), namespace=namespace)
        until(lambda: len(seen.ready()) == 1, "the Pod without a planner to be ready")
        (pod,) = [pod for pod in seen.pods() if (pod.metadata and (pod.metadata.labels or {})["app"] == "alone")]
        assert names.INJECTED in ((pod.metadata.annotations or {}) if pod.metadata else {})
        until(lambda: "alone" in dict(seen.events("PlannerUnavailable")), "the Event about the planner")


def test_rejected_pods_start_with_an_event(
    fleet: Installation, plane: ControlPlane, admin: Client, namespace: str, tmp_path: Path
) -> None:
    """An unknown command, a shell's command, and two engines in one Pod: each Event has the remedy."""
    fleet.start("webhook")
    fleet.start("controller")
    seen = NamespaceView(admin, namespace)
    two = deployment("two", 1, ["vllm", "serve", "m"])
    containers = two.spec.template.spec.containers if two.spec and two.spec.template.spec else []
    containers.append(Container(name="other", image="none", command=["sglang", "serve"]))
    for made in (
        deployment("unknown", 1, [*OK_SERVER_COMMAND, str(PORT)]),
        deployment("shell", 1, ["sh", "-c", "vllm serve m"]),
        two,
    ):
        admin.create(made, namespace=namespace)
    until(lambda: len(seen.events("NotInjected")) == 3, "Events of three Pods")
    messages = {name.split("-")[0]: message for name, message in seen.events("NotInjected")}
    assert (True, True, True) == (
        "neither vLLM nor SGLang" in messages["unknown"],
        "shell" in messages["shell"],
        names.CONTAINER in messages["two"],
    )
    assert 3 == len(seen.pods())


OK_SERVER_COMMAND: Final = [sys.executable, str(Path(__file__).with_name("ok_server.py"))]
"""A server that is no engine and returns 200 for every request."""
UNUSED_RULES: Final[dict[Component, set[tuple[str, str, str]]]] = {
    "controller": {
        # This cluster has no LeaderWorkerSets: only lists, without a result.
        ("watch", "leaderworkerset.x-k8s.io", "leaderworkersets"),
        # The chart creates the Lease, but it may be deleted.
        ("create", "coordination.k8s.io", "leases"),
        # No Event occurs twice here; tests/kube/test_cluster_writes.py covers that.
        ("patch", "", "events"),
    },
    # As for the Lease.
    "webhook": {("create", "", "secrets")},
}
"""Rights that the chart grants and this test does not use."""


def scale(admin: Client, namespace: str, name: str, replicas: int) -> None:
    admin.patch(Deployment, name, {"spec": {"replicas": replicas}}, namespace=namespace)


def deletion_cost(pod: Pod) -> str | None:
    return (pod.metadata.annotations or {}).get(names.DELETION_COST) if pod.metadata else None


def plan_batch_counts(planner: httpx.Client) -> dict[str, float]:
    """Return the number of plans so far for two forks, and for three or four."""
    cumulative_counts = {
        sample.labels["le"]: sample.value
        for family in text_string_to_metric_families(planner.get("/metrics").text)
        for sample in family.samples
        if sample.name == "rfork_planner_plan_batch_size_bucket"
    }
    return {
        "two": cumulative_counts["2.0"] - cumulative_counts["1.0"],
        "three or four": cumulative_counts["4.0"] - cumulative_counts["2.0"],
    }


def granted_rules(admin: Client, fleet: Installation, component: Component) -> set[tuple[str, str, str]]:
    """Return verb, API group and resource of each rule that the chart grants to a component."""
    name = f"{fleet.release}-{component}"
    rules = [
        *(admin.get(ClusterRole, name).rules or ()),
        *(admin.get(Role, name, namespace=fleet.namespace).rules or ()),
    ]
    return {
        (verb, group, resource)
        for rule in rules
        for verb in rule.verbs
        for group in rule.apiGroups or ()
        for resource in rule.resources or ()
    }


def used_rules(
    plane: ControlPlane, fleet: Installation, component: Component, namespace: str
) -> set[tuple[str, str, str]]:
    """Return the same for its calls. A rejected call is an error here.

    Watches of a previous test's namespace that is being deleted get 403 and are ignored.
    """
    calls: list[AuditedCall] = plane.calls(fleet.user(component))
    own = ("", namespace, fleet.namespace)
    refused = [call for call in calls if call.code == 403 and call.namespace in own]
    assert [] == refused
    return {(call.verb, call.group, call.resource) for call in calls}
