"""The controller as a process, with a real API server and a real planner: crashes and outages.

There are no engines: the test requests the Pods' forks and registers their instances over REST, as engines
would. The planner does not expire instances here, so only the controller removes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, cast

import httpx
import pytest
from lightkube import Client
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Event, Pod

from planner.integrations.kubernetes import names
from rfork.schema import ForkRequest, ForkResult, HolderReport, InstanceReport, Placement
from tests.kube.control_plane import ControlPlane
from tests.kube.installation import Installation, installed
from tests.kube.test_kubelet import until
from tests.ports import free_ports
from tests.unit.planner.integrations.kubernetes.fake_planner_api import IMAGE_BYTES, instance, instance_id

GRACE_S: Final = 2
NEVER_S: Final = 3600
NAME: Final = "serve"
PROBE: Final = {"httpGet": {"path": "/health", "port": 8000}}


@pytest.fixture
def fleet(plane: ControlPlane, admin: Client, helm: Path, namespace: str, tmp_path: Path) -> Iterator[Installation]:
    """The chart, with a planner that expires no instance and plans immediately."""
    with installed(plane, admin, helm, namespace, tmp_path) as made:
        made.values["planner"]["settings"] = {"instance_ttl_s": NEVER_S, "scaleup_wait_s": 0}
        made.values["controller"]["readinessGraceSeconds"] = GRACE_S
        made.start("planner")
        yield made


@pytest.fixture
def planner(fleet: Installation) -> Iterator[httpx.Client]:
    """A client of the planner with an operator token."""
    with fleet.client() as client:
        yield client


class ServedDeployment:
    """A Deployment whose Pods request forks, and queries about it."""

    def __init__(self, admin: Client, namespace: str, planner: httpx.Client) -> None:
        self._admin, self._namespace, self._planner = admin, namespace, planner
        labels = {"app": NAME, names.MODEL: "llama"}
        document = {
            "metadata": {"name": NAME, "labels": labels},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": NAME}},
                "template": {
                    # As if injected by the webhook, which does not run here.
                    "metadata": {"labels": labels, "annotations": {names.INJECTED: "1"}},
                    "spec": {
                        "readinessGates": [{"conditionType": names.WEIGHTS_READY}],
                        "containers": [{"name": "engine", "image": "none", "readinessProbe": PROBE}],
                    },
                },
            },
        }
        made = admin.create(cast(Deployment, Deployment.from_dict(document)), namespace=namespace)
        self.uid = str(made.metadata.uid if made.metadata else "")

    def scale(self, replicas: int) -> None:
        """Set the number of replicas."""
        self._admin.patch(Deployment, NAME, {"spec": {"replicas": replicas}}, namespace=self._namespace)

    def scale_and_wait(self, replicas: int) -> list[str]:
        """Set the number of replicas, wait for their Pods, and return the UIDs of the new ones."""
        before = set(self.pods())
        self.scale(replicas)
        until(lambda: len(self.pods()) == replicas, f"{replicas} Pods")
        return sorted(set(self.pods()) - before)

    def pods(self) -> dict[str, str]:
        """Return the names of Pods that are not terminating, by UID."""
        found = self._admin.list(Pod, namespace=self._namespace)
        living = [pod.metadata for pod in found if pod.metadata and not pod.metadata.deletionTimestamp]
        return {str(each.uid): str(each.name) for each in living}

    def gate(self, uid: str) -> tuple[str, str]:
        """Return status and reason of the gate's condition; empty without one."""
        status = self._admin.get(Pod, self.pods()[uid], namespace=self._namespace).status
        for each in (status.conditions if status else None) or ():
            if each.type == names.WEIGHTS_READY:
                return each.status, str(each.reason)
        return "", ""

    def containers_ready(self, uid: str) -> None:
        """Set the conditions that the kubelet sets once the engine responds."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "ContainersReady", "status": "True", "lastTransitionTime": now}
        status = {"phase": "Running", "conditions": [ready]}
        self._admin.patch(Pod.Status, self.pods()[uid], {"status": status}, namespace=self._namespace)

    def kill(self, uid: str) -> None:
        """Delete it with `kubectl delete pod --force`, without waiting."""
        self._admin.delete(Pod, self.pods()[uid], namespace=self._namespace, grace_period=0)

    def register(self, uid: str) -> None:
        """Register a Pod's only rank as serving."""
        report = instance(uid).report
        self._put(f"/v1/instances/{report.instance_id}", report)

    def request_fork(self, uid: str) -> None:
        """Request a fork for a Pod's only rank."""
        report = instance(uid, "loading", chunks=0, weights_id=None).report
        fork_request = ForkRequest(fork_id=f"f-{uid}", instance=report).model_dump(mode="json")
        self._planner.post("/v1/forks", json=fork_request).raise_for_status()

    def finish_fork(self, uid: str, source: str) -> None:
        """Finish its fork successfully; it serves."""
        sources = {instance_id(source): IMAGE_BYTES}
        finish = ForkResult(outcome="forked", seconds=3.1, bytes_read=IMAGE_BYTES, sources=sources)
        path = f"/v1/forks/f-{uid}/finish"
        self._planner.post(path, json=finish.model_dump(mode="json")).raise_for_status()
        self.register(uid)

    def instances(self) -> set[str]:
        """Return the UIDs of the Pods whose instance the planner knows."""
        views = self._planner.get("/v1/instances").raise_for_status().json()["items"]
        return {view["report"]["instance_id"][: len(self.uid)] for view in views}

    def expected(self) -> int:
        """Return the replicas of this Deployment that the planner still expects."""
        views = self._planner.get("/v1/scaleups").raise_for_status().json()
        mine = [view for view in views if view["scaleup"]["scaleup_id"] == self.uid]
        return sum(view["scaleup"]["replicas"] - view["arrived_count"] for view in mine)

    def hosts(self) -> list[str]:
        """Return the announced hosts of this Deployment's replicas."""
        views = self._planner.get("/v1/scaleups").raise_for_status().json()
        return [
            host for view in views if view["scaleup"]["scaleup_id"] == self.uid for host in view["scaleup"]["hosts"]
        ]

    def wanted(self, host: str) -> list[tuple[str, str]]:
        """Return model and cause of the images that the holder of this host should keep; it sends a heartbeat."""
        report = HolderReport(holder_id=f"holder-{host}", placement=Placement(host=host), memory_bytes=10**12)
        body = report.model_dump(mode="json")
        ack = self._planner.put(f"/v1/holders/{report.holder_id}", json=body).raise_for_status().json()
        return [(each["model"], each["cause"]) for each in ack["wanted"]]

    def events(self, reason: str) -> dict[str, int]:
        """Return the number of Events of each object, by its name."""
        found = self._admin.list(Event, namespace=self._namespace)
        counts: dict[str, int] = {}
        for event in found:
            if event.reason == reason:
                name = str(event.involvedObject.name)
                counts[name] = counts.get(name, 0) + (event.count or 1)
        return counts

    def _put(self, path: str, report: InstanceReport) -> None:
        self._planner.put(path, json=report.model_dump(mode="json")).raise_for_status()


@pytest.fixture
def served(admin: Client, namespace: str, planner: httpx.Client) -> ServedDeployment:
    """The Deployment, without replicas yet."""
    return ServedDeployment(admin, namespace, planner)


def start_first_pod(served: ServedDeployment) -> str:
    """Return the UID of the only Pod, whose instance serves and whose gate is open."""
    (first,) = served.scale_and_wait(1)
    served.register(first)
    until(lambda: served.gate(first) == ("True", "Serving"), "the first Pod's gate to open")
    return first


def is_leader(fleet: Installation, name: str) -> bool:
    """Return True if the replica is the leader."""
    return fleet.metric(name, "rfork_controller_leader") == 1


def reconcile_count(fleet: Installation, name: str) -> float:
    """Return the number of reconciles."""
    return fleet.metric(name, "rfork_controller_reconcile_seconds_count")


def action_count(fleet: Installation, name: str, action: str) -> float:
    """Return the number of completed actions."""
    return fleet.metric(name, "rfork_controller_actions_total", action=action)


def announcement_count(fleet: Installation, served: ServedDeployment) -> int:
    """Return the number of announcements of the Deployment's replicas to the planner."""
    lines = fleet.log("planner").splitlines()
    return sum("scale-up announced" in line and served.uid in line for line in lines)


def wait_reconciled(fleet: Installation, name: str) -> None:
    """Wait until the replica has polled the planner and reconciled after this call."""
    enough = reconcile_count(fleet, name) + 7  # reconciles are a tenth of a second apart, polls half a second
    until(lambda: reconcile_count(fleet, name) >= enough, f"{name} to reconcile")


def test_the_leader_is_killed_during_a_scale_up(fleet: Installation, served: ServedDeployment) -> None:
    """The other takes over: the scale-up is announced at most once more, each fork is reported once."""
    fleet.start("controller", "a")
    fleet.start("controller", "b", RFORK_K8S_HEALTH_PORT=str(free_ports(1)[0]))
    until(lambda: is_leader(fleet, "a") != is_leader(fleet, "b"), "a leader")
    leader, other = ("a", "b") if is_leader(fleet, "a") else ("b", "a")
    first = start_first_pod(served)
    second, third, fourth = served.scale_and_wait(4)
    until(lambda: served.expected() == 3, "three announced replicas")
    served.request_fork(second)
    served.request_fork(third)
    until(lambda: served.expected() == 1, "arrived replicas to be counted")
    served.finish_fork(second, first)
    until(lambda: len(served.events("Forked")) == 1, "the Event of the first fork")
    before, scaleup_events = announcement_count(fleet, served), served.events("ScaleUp")

    fleet.kill(leader)
    until(lambda: is_leader(fleet, other), "the other replica to lead")
    wait_reconciled(fleet, other)
    assert 1 == served.expected()
    assert announcement_count(fleet, served) - before <= 1
    served.finish_fork(third, first)
    served.request_fork(fourth)
    until(lambda: served.expected() == 0, "the scale-up to be withdrawn")
    served.finish_fork(fourth, first)
    new = [second, third, fourth]
    until(lambda: all(served.gate(uid) == ("True", "Forked") for uid in new), "open gates")
    until(lambda: len(served.events("Forked")) == 3, "Events of the forks")
    wait_reconciled(fleet, other)
    assert dict.fromkeys((served.pods()[uid] for uid in new), 1) == served.events("Forked")
    assert scaleup_events == served.events("ScaleUp")
    assert {first, *new} == served.instances()
    assert 0 == action_count(fleet, other, "remove")


def test_the_api_server_is_killed_and_restarted(
    fleet: Installation, served: ServedDeployment, plane: ControlPlane
) -> None:
    """Without it the controller does not lead; afterwards it continues with all of its state."""
    fleet.start("controller")
    first = start_first_pod(served)
    (second,) = served.scale_and_wait(2)
    served.register(second)
    until(lambda: served.gate(second)[0] == "True", "the second Pod's gate to open")
    plane.kill_api_server()
    try:
        until(lambda: not is_leader(fleet, "controller"), "leadership to end without renewals")
        assert {first, second} == served.instances()
    finally:
        plane.start_api_server()
    served.scale_and_wait(4)
    until(lambda: served.expected() == 2, "an announcement after the restart")
    assert {first, second} == served.instances()
    served.kill(second)
    until(lambda: served.instances() == {first}, "instances of dead Pods to be removed")
    assert 0 == fleet.log("controller").count("Traceback")


def bind(plane: ControlPlane, namespace: str, pod: str, node: str) -> None:
    """Bind a Pod to a node, as the scheduler does."""
    binding = {"metadata": {"name": pod}, "target": {"apiVersion": "v1", "kind": "Node", "name": node}}
    with plane.client() as client:
        client.post(f"/api/v1/namespaces/{namespace}/pods/{pod}/binding", json=binding).raise_for_status()


def test_nodes_of_bound_pods_are_announced(
    fleet: Installation, served: ServedDeployment, plane: ControlPlane, namespace: str
) -> None:
    """Once a Pod is bound to a node, before its containers start, the planner knows that node."""
    fleet.start("controller")
    start_first_pod(served)
    second, third = served.scale_and_wait(3)
    until(lambda: served.expected() == 2, "two announced replicas")
    until(lambda: served.events("ScaleUp") == {NAME: 2}, "the Events of both scale-ups")
    assert [] == served.hosts()
    bind(plane, namespace, served.pods()[second], "node-7")
    until(lambda: served.hosts() == ["node-7"], "the node of the first bound Pod")
    assert 2 == served.expected()
    bind(plane, namespace, served.pods()[third], "node-8")
    until(lambda: served.hosts() == ["node-7", "node-8"], "the node of the other Pod")
    assert 2 == served.expected()
    wait_reconciled(fleet, "controller")
    assert {NAME: 2} == served.events("ScaleUp")


def test_a_holder_gets_the_weights_before_the_containers_start(
    fleet: Installation, served: ServedDeployment, plane: ControlPlane, namespace: str
) -> None:
    """As soon as the Pod is bound, the holder of its node is to keep them, and no other holder."""
    # Nodes of its own: the controller watches all namespaces, and that of an earlier test may still be deleted.
    fleet.start("controller")
    start_first_pod(served)
    assert [] == served.wanted("node-9")
    (second,) = served.scale_and_wait(2)
    until(lambda: served.expected() == 1, "an announced replica")
    assert [] == served.wanted("node-9")
    bind(plane, namespace, served.pods()[second], "node-9")
    until(lambda: served.wanted("node-9") == [("llama", "announced")], "the weights to be wanted on the Pod's node")
    assert [] == served.wanted("node-10")
    served.request_fork(second)
    until(lambda: served.expected() == 0, "the Pod to arrive")


def test_a_pod_is_force_deleted(fleet: Installation, served: ServedDeployment) -> None:
    """Its instance is removed from the planner, and no other; its replacement is expected."""
    fleet.start("controller")
    first = start_first_pod(served)
    (second,) = served.scale_and_wait(2)
    served.register(second)
    until(lambda: served.expected() == 0, "the second Pod to arrive")
    served.kill(first)
    until(lambda: served.instances() == {second}, "the dead Pod's instance to be removed")
    until(lambda: served.expected() == 1, "the replacement to be expected")
    assert 1 == action_count(fleet, "controller", "remove")


def test_the_planner_is_killed_and_restarted(fleet: Installation, served: ServedDeployment) -> None:
    """Gates open during the outage and stay open; nothing is removed; scale-ups are announced again."""
    fleet.start("controller")
    first = start_first_pod(served)
    (second,) = served.scale_and_wait(2)
    until(lambda: served.expected() == 1, "the second Pod to be announced")
    served.request_fork(second)
    served.containers_ready(second)
    # Withdrawn: so the controller has observed that the planner knows it, still loading.
    until(lambda: served.expected() == 0, "the second Pod to arrive")
    assert "True" != served.gate(second)[0]
    fleet.kill("planner")
    until(lambda: served.gate(second) == ("True", "UnknownToPlanner"), "the gate to open")
    (third,) = served.scale_and_wait(3)

    fleet.start("planner")
    until(lambda: served.expected() == 1, "the third Pod to be announced to the new planner")
    served.register(first)
    served.register(second)
    wait_reconciled(fleet, "controller")
    assert {first, second} == served.instances()
    assert [("True", "Serving"), ("True", "UnknownToPlanner")] == [served.gate(first), served.gate(second)]
    served.register(third)
    until(lambda: served.gate(third) == ("True", "Serving"), "the third Pod's gate to open")
    assert 0 == action_count(fleet, "controller", "remove")
    assert {first, second, third} == set(served.pods())
