"""The controller as a process, beside a real API server and a real planner: what it goes on through.

There are no engines: the test asks for the Pods' forks and registers their instances, over REST, as they
would. The planner never forgets them by itself here, so whatever is removed, the controller removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

import httpx
import pytest
from lightkube import Client
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Event, Pod

from planner.integrations.kubernetes import names
from rfork.schema import ForkRequest, ForkResult, InstanceReport
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
    """The chart, with a planner that forgets nobody, and plans at once."""
    with installed(plane, admin, helm, namespace, tmp_path) as made:
        made.values["planner"]["settings"] = {"forget_s": NEVER_S, "gather_s": 0}
        made.values["controller"]["graceSeconds"] = GRACE_S
        made.start("planner")
        yield made


@pytest.fixture
def planner(fleet: Installation) -> Iterator[httpx.Client]:
    """An operator's client of it."""
    with fleet.client() as client:
        yield client


class ServedDeployment:
    """A Deployment whose Pods ask for forks, and what is known of it."""

    def __init__(self, admin: Client, namespace: str, planner: httpx.Client) -> None:
        self._admin, self._namespace, self._planner = admin, namespace, planner
        labels = {"app": NAME, names.MODEL: "llama"}
        document = {
            "metadata": {"name": NAME, "labels": labels},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": NAME}},
                "template": {
                    # As if the webhook, which does not run here, had seen them.
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
        """Want so many."""
        self._admin.patch(Deployment, NAME, {"spec": {"replicas": replicas}}, namespace=self._namespace)

    def scale_and_wait(self, replicas: int) -> list[str]:
        """Want so many, and wait for their Pods: the UIDs of those that are new."""
        before = set(self.pods())
        self.scale(replicas)
        until(lambda: len(self.pods()) == replicas, f"there are no {replicas} Pods")
        return sorted(set(self.pods()) - before)

    def pods(self) -> dict[str, str]:
        """Names by UID, of those that are not about to end."""
        found = self._admin.list(Pod, namespace=self._namespace)
        living = [pod.metadata for pod in found if pod.metadata and not pod.metadata.deletionTimestamp]
        return {str(each.uid): str(each.name) for each in living}

    def gate(self, uid: str) -> tuple[str, str]:
        """Status and reason of the condition that a Pod's gate is for; nothing yet: empty."""
        status = self._admin.get(Pod, self.pods()[uid], namespace=self._namespace).status
        for each in (status.conditions if status else None) or ():
            if each.type == names.WEIGHTS_READY:
                return each.status, str(each.reason)
        return "", ""

    def containers_ready(self, uid: str) -> None:
        """What the kubelet says once the engine answers."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "ContainersReady", "status": "True", "lastTransitionTime": now}
        status = {"phase": "Running", "conditions": [ready]}
        self._admin.patch(Pod.Status, self.pods()[uid], {"status": status}, namespace=self._namespace)

    def kill(self, uid: str) -> None:
        """`kubectl delete pod --force`: nobody waits for its end."""
        self._admin.delete(Pod, self.pods()[uid], namespace=self._namespace, grace_period=0)

    def register(self, uid: str) -> None:
        """A Pod's one rank serves."""
        report = instance(uid).report
        self._put(f"/v1/instances/{report.instance_id}", report)

    def request_fork(self, uid: str) -> None:
        """A Pod's one rank asks for its fork."""
        report = instance(uid, "loading", chunks=0, weights_id=None).report
        fork_request = ForkRequest(fork_id=f"f-{uid}", instance=report).model_dump(mode="json")
        self._planner.post("/v1/forks", json=fork_request).raise_for_status()

    def finish_fork(self, uid: str, source: str) -> None:
        """Its fork has ended well, and it serves."""
        sources = {instance_id(source): IMAGE_BYTES}
        finish = ForkResult(outcome="forked", seconds=3.1, bytes_read=IMAGE_BYTES, sources=sources)
        path = f"/v1/forks/f-{uid}/finish"
        self._planner.post(path, json=finish.model_dump(mode="json")).raise_for_status()
        self.register(uid)

    def instances(self) -> set[str]:
        """UIDs of the Pods whose instance the planner knows."""
        views = self._planner.get("/v1/instances").raise_for_status().json()["items"]
        return {view["report"]["instance_id"][: len(self.uid)] for view in views}

    def expected(self) -> int:
        """Replicas of this Deployment that the planner still expects."""
        views = self._planner.get("/v1/scaleups").raise_for_status().json()
        mine = [view for view in views if view["scaleup"]["scaleup_id"] == self.uid]
        return sum(view["scaleup"]["replicas"] - view["arrived"] for view in mine)

    def events(self, reason: str) -> dict[str, int]:
        """How often each object was told something, by its name."""
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
    """The Deployment, with no replica yet."""
    return ServedDeployment(admin, namespace, planner)


def start_first_pod(served: ServedDeployment) -> str:
    """The UID of the only Pod, whose instance serves and whose gate is open."""
    (first,) = served.scale_and_wait(1)
    served.register(first)
    until(lambda: served.gate(first) == ("True", "Serving"), "the first's gate is not open")
    return first


def is_leader(fleet: Installation, name: str) -> bool:
    """Whether the replica is the one that acts."""
    return fleet.metric(name, "rfork_controller_leader") == 1


def reconcile_count(fleet: Installation, name: str) -> float:
    """How often it has reconciled."""
    return fleet.metric(name, "rfork_controller_reconcile_seconds_count")


def action_count(fleet: Installation, name: str, action: str) -> float:
    """How often it has done something."""
    return fleet.metric(name, "rfork_controller_actions_total", action=action)


def announcement_count(fleet: Installation, served: ServedDeployment) -> int:
    """How often the planner was told of the Deployment's replicas."""
    lines = fleet.log("planner").splitlines()
    return sum("scale-up announced" in line and served.uid in line for line in lines)


def wait_reconciled(fleet: Installation, name: str) -> None:
    """Wait until it has looked at the planner, and acted by what it saw, since this was called."""
    enough = reconcile_count(fleet, name) + 7  # they are a tenth of a second apart, looks are half a second
    until(lambda: reconcile_count(fleet, name) >= enough, f"{name} does not go on")


def test_the_leader_is_killed_while_replicas_come(fleet: Installation, served: ServedDeployment) -> None:
    """The other takes over: the scale-up is announced once more at most, each fork is told of once."""
    fleet.start("controller", "a")
    fleet.start("controller", "b", RFORK_K8S_HEALTH_PORT=str(free_ports(1)[0]))
    until(lambda: is_leader(fleet, "a") != is_leader(fleet, "b"), "nobody leads")
    leader, other = ("a", "b") if is_leader(fleet, "a") else ("b", "a")
    first = start_first_pod(served)
    second, third, fourth = served.scale_and_wait(4)
    until(lambda: served.expected() == 3, "three are not announced")
    served.request_fork(second)
    served.request_fork(third)
    until(lambda: served.expected() == 1, "those that came are still expected")
    served.finish_fork(second, first)
    until(lambda: len(served.events("Forked")) == 1, "the first fork is not told of")
    before, scaleup_events = announcement_count(fleet, served), served.events("ScaleUp")

    fleet.kill(leader)
    until(lambda: is_leader(fleet, other), "the other does not lead")
    wait_reconciled(fleet, other)
    assert 1 == served.expected()
    assert announcement_count(fleet, served) - before <= 1
    served.finish_fork(third, first)
    served.request_fork(fourth)
    until(lambda: served.expected() == 0, "the scale-up is not withdrawn")
    served.finish_fork(fourth, first)
    new = [second, third, fourth]
    until(lambda: all(served.gate(uid) == ("True", "Forked") for uid in new), "gates are shut")
    until(lambda: len(served.events("Forked")) == 3, "forks are not told of")
    wait_reconciled(fleet, other)
    assert dict.fromkeys((served.pods()[uid] for uid in new), 1) == served.events("Forked")
    assert scaleup_events == served.events("ScaleUp")
    assert {first, *new} == served.instances()
    assert 0 == action_count(fleet, other, "remove")


def test_the_api_server_is_killed_and_started(
    fleet: Installation, served: ServedDeployment, plane: ControlPlane
) -> None:
    """Without it the controller does not lead; with it, it goes on, and has lost nothing that it knew."""
    fleet.start("controller")
    first = start_first_pod(served)
    (second,) = served.scale_and_wait(2)
    served.register(second)
    until(lambda: served.gate(second)[0] == "True", "the second's gate is not open")
    plane.kill_api_server()
    try:
        until(lambda: not is_leader(fleet, "controller"), "it leads without renewing its Lease")
        assert {first, second} == served.instances()
    finally:
        plane.start_api_server()
    served.scale_and_wait(4)
    until(lambda: served.expected() == 2, "nothing is announced any more")
    assert {first, second} == served.instances()
    served.kill(second)
    until(lambda: served.instances() == {first}, "the dead are not removed any more")
    assert 0 == fleet.log("controller").count("Traceback")


def test_a_pod_is_deleted_by_force(fleet: Installation, served: ServedDeployment) -> None:
    """Its instance is removed from the planner, and no other; the one in its place is expected."""
    fleet.start("controller")
    first = start_first_pod(served)
    (second,) = served.scale_and_wait(2)
    served.register(second)
    until(lambda: served.expected() == 0, "the second is still expected")
    served.kill(first)
    until(lambda: served.instances() == {second}, "the dead are not removed")
    until(lambda: served.expected() == 1, "the one in its place is not expected")
    assert 1 == action_count(fleet, "controller", "remove")


def test_the_planner_is_killed_and_started(fleet: Installation, served: ServedDeployment) -> None:
    """Gates open while it is away; what it forgot is neither removed nor shut again, and it is told anew."""
    fleet.start("controller")
    first = start_first_pod(served)
    (second,) = served.scale_and_wait(2)
    until(lambda: served.expected() == 1, "the second is not announced")
    served.request_fork(second)
    served.containers_ready(second)
    # Withdrawn: so the controller has seen that the planner knows it, as one that is loading still.
    until(lambda: served.expected() == 0, "the second is still expected")
    assert "True" != served.gate(second)[0]
    fleet.kill("planner")
    until(lambda: served.gate(second) == ("True", "UnknownToPlanner"), "the gate stays shut")
    (third,) = served.scale_and_wait(3)

    fleet.start("planner")
    until(lambda: served.expected() == 1, "the third is not announced to the new one")
    served.register(first)
    served.register(second)
    wait_reconciled(fleet, "controller")
    assert {first, second} == served.instances()
    assert [("True", "Serving"), ("True", "UnknownToPlanner")] == [served.gate(first), served.gate(second)]
    served.register(third)
    until(lambda: served.gate(third) == ("True", "Serving"), "the third's gate does not open")
    assert 0 == action_count(fleet, "controller", "remove")
    assert {first, second, third} == set(served.pods())
