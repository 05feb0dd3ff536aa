"""Replaces scheduler and kubelet: runs the Pods of one namespace as processes of this machine.

::

    with Kubelet(plane, namespace, tmp_path) as kubelet:
        admin.create(deployment)      # its Pods are bound, started, probed, and become Ready
        print(kubelet.log("pod-name"))

It creates its own Nodes (`nodes`: their names and labels), binds each new Pod to the next one, assigns an
address in 127.1.0.0/16, runs its init containers and then its containers as processes, and posts its status.
On deletion it runs preStop, sends SIGTERM, waits for the grace period, sends SIGKILL, and deletes the object.
Init containers named ``rfork-files`` run from `image`; without one they are skipped, because rfork is installed
here. There are no other images, no volumes but emptyDirs, and no limits, liveness or startup probes. Processes
that exit are restarted (`restartPolicy: Always`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Final

import httpx
from typing_extensions import Self

from tests.kube.container_image import ContainerImage, Volumes
from tests.kube.containers import Container, Document, MissingReference, NodeEnvironment
from tests.kube.control_plane import ControlPlane

IN_THE_IMAGE: Final = "rfork-files"
"""Init container that runs from the planner's image."""
POLL_INTERVAL_S: Final = 0.1
"""Interval between two polls of the Pods and their processes."""
RESTART_S: Final = 1.0
NODES: Final[Mapping[str, Mapping[str, str]]] = {"node-a": {}, "node-b": {}}
MERGE: Final = {"Content-Type": "application/strategic-merge-patch+json"}
_addresses = itertools.count(2)
"""Each address is used once, because another test's processes may still listen on theirs."""


class Kubelet:
    """Stand-in kubelet. Node names are prefixed with the namespace, because Nodes are cluster-scoped."""

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str,
        folder: Path,
        *,
        nodes: Mapping[str, Mapping[str, str]] = NODES,
        node_environment: NodeEnvironment | None = None,
        image: ContainerImage | None = None,
    ) -> None:
        self.nodes = {f"{namespace}-{name}": labels for name, labels in nodes.items()}
        self.node_environment = node_environment or NodeEnvironment()
        self.image = image
        self.api = plane.client()
        self.probes = httpx.Client(verify=False)
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.failures: list[Exception] = []
        self._secrets = f"/api/v1/namespaces/{namespace}"
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._next_node: Iterator[str] = itertools.cycle(self.nodes)
        self._runners: dict[str, PodRunner] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet")

    def __enter__(self) -> Self:
        for name, labels in self.nodes.items():
            node = {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}}
            self.api.post("/api/v1/nodes", json=node).raise_for_status()
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        for runner in self._runners.values():
            runner.abandon()
        for runner in self._runners.values():
            runner.join()
            if error_type is not None:
                print(f"--- {runner.name}\n{self.log(runner.name)}")
        for name in self.nodes:
            with contextlib.suppress(httpx.HTTPError):
                self.api.delete(f"/api/v1/nodes/{name}")
        self.api.close()
        self.probes.close()
        if self.failures and error_type is None:
            raise self.failures[0]

    def log(self, pod: str) -> str:
        """Return the output of a Pod's containers so far, even if it was deleted."""
        path = self.log_path(pod)
        return path.read_text(errors="replace") if path.exists() else ""

    def log_path(self, pod: str) -> Path:
        """Path of that output."""
        return self._folder / f"{pod}.log"

    def volumes(self, pod: Document) -> Volumes:
        """Return the volumes of a Pod."""
        return Volumes(self._folder / f"{pod['metadata']['name']}-volumes", pod["spec"], {})

    def find(self, resource: str, name: str) -> Document | None:
        """Return a Secret or ConfigMap, or None if it does not exist."""
        response = self.api.get(f"{self._secrets}/{resource}/{name}")
        return response.json() if response.is_success else None

    def _run(self) -> None:
        while not self._stopping.wait(POLL_INTERVAL_S):
            with contextlib.suppress(httpx.HTTPError):  # the API server may be down: retry in the next poll
                self._reconcile(self.api.get(self.pods).raise_for_status().json()["items"])

    def _reconcile(self, pods: list[Document]) -> None:
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if uid not in self._runners:
                self._runners[uid] = PodRunner(self, pod, next(self._next_node))
            self._runners[uid].pod = pod
        for uid in self._runners.keys() - {pod["metadata"]["uid"] for pod in pods}:
            self._runners[uid].abandon()  # its object was force-deleted


class PodRunner(threading.Thread):
    """Runs one Pod, from its binding to its end."""

    def __init__(self, kubelet: Kubelet, pod: Document, node: str) -> None:
        super().__init__(name=pod["metadata"]["name"])
        self.pod = pod
        """The Pod as last observed."""
        number = next(_addresses)
        self._address = f"127.1.{number // 250}.{number % 250 + 1}"
        self._kubelet = kubelet
        self._node = node
        self._path = f"{kubelet.pods}/{self.name}"
        self._abandoned = threading.Event()
        self._conditions: dict[str, tuple[str, str]] = {}
        self._posted: Document = {}
        self._made: list[Container] = []
        self.start()

    def abandon(self) -> None:
        """Kill its processes without touching the object."""
        self._abandoned.set()

    def run(self) -> None:
        """Run the Pod until its end."""
        try:
            self._bind()
            if self._initialise():
                self._serve()
            self._end()
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (404, 409):  # it was deleted meanwhile
                self._kubelet.failures.append(error)
        except Exception as error:  # a bug in this stand-in must fail the test
            self._kubelet.failures.append(error)
        finally:
            for container in self._made:
                container.kill()

    @property
    def _ending(self) -> bool:
        return self._abandoned.is_set() or self.pod["metadata"].get("deletionTimestamp") is not None

    def _bind(self) -> None:
        if not self.pod["spec"].get("nodeName"):
            target = {"apiVersion": "v1", "kind": "Node", "name": self._node}
            binding = {"metadata": {"name": self.name}, "target": target}
            self._kubelet.api.post(f"{self._path}/binding", json=binding).raise_for_status()
        self._post("Pending", [])
        # Its current state: with its node, its address, and changes by webhooks for bindings.
        self.pod = self._kubelet.api.get(self._path).raise_for_status().json()

    def _initialise(self) -> bool:
        """Run the init containers in order. Returns False if the Pod's end came first."""
        for spec in self.pod["spec"].get("initContainers", ()):
            image = self._kubelet.image if spec["name"] == IN_THE_IMAGE else None
            if spec["name"] == IN_THE_IMAGE and image is None:
                continue
            container = self._container(spec, image)
            while not self._ending:
                self._start(container)
                while container.exit_code is None and container.restarts >= 0 and not self._ending:
                    time.sleep(POLL_INTERVAL_S)
                if container.exit_code == 0:
                    break
                self._abandoned.wait(RESTART_S)
        return not self._ending

    def _serve(self) -> None:
        """Run the containers until the Pod's end."""
        containers = [self._container(spec) for spec in self.pod["spec"]["containers"]]
        starts = dict.fromkeys(containers, 0.0)
        while not self._ending:
            for container in containers:
                stopped = container.restarts < 0 or container.exit_code is not None
                if stopped and time.monotonic() - starts[container] > RESTART_S:
                    starts[container] = time.monotonic()
                    self._start(container)
            ready = [each.ready(self._kubelet.probes, self._address) for each in containers]
            with contextlib.suppress(httpx.TransportError):  # the API server may be down
                self._post("Running", [_status(*each) for each in zip(containers, ready, strict=True)])
            self._abandoned.wait(POLL_INTERVAL_S)

    def _end(self) -> None:
        """Terminate a deleted Pod, as a kubelet does."""
        if self._abandoned.is_set():
            return
        grace_s = float(self.pod["metadata"].get("deletionGracePeriodSeconds") or 0)
        stop_threads = [
            threading.Thread(target=each.stop, args=(grace_s,)) for each in self._made if each.exit_code is None
        ]
        for stop_thread in stop_threads:
            stop_thread.start()
        for stop_thread in stop_threads:
            stop_thread.join()
        delete_options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.pod["metadata"]["uid"]}}
        self._kubelet.api.request("DELETE", self._path, json=delete_options).raise_for_status()

    def _container(self, spec: Document, image: ContainerImage | None = None) -> Container:
        log, volumes = self._kubelet.log_path(self.name), self._kubelet.volumes(self.pod)
        container = Container(self.pod, spec, self._kubelet.node_environment, log, volumes, image)
        self._made.append(container)
        return container

    def _start(self, container: Container) -> None:
        try:
            container.start(self._kubelet.find)
        except (MissingReference, OSError, ValueError) as error:
            with self._kubelet.log_path(self.name).open("a") as log:
                log.write(f"kubelet: cannot start {container.name}: {error}\n")

    def _post(self, phase: str, containers: list[Document]) -> None:
        """Post the status if it changed."""
        containers_ready = bool(containers) and all(each["ready"] for each in containers)
        seen = {each["type"]: each["status"] for each in self.pod.get("status", {}).get("conditions", ())}
        gates = [gate["conditionType"] for gate in self.pod["spec"].get("readinessGates", ())]
        closed_gates = [gate for gate in gates if seen.get(gate) != "True"]
        condition_values = {
            "PodScheduled": True,
            "Initialized": phase == "Running",
            "ContainersReady": containers_ready,
            "Ready": containers_ready and not closed_gates,
        }
        status: Document = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "conditions": [
                self._condition(condition_type, str(is_true)) for condition_type, is_true in condition_values.items()
            ],
            "containerStatuses": containers,
        }
        if status != self._posted:
            patch = {"metadata": {"uid": self.pod["metadata"]["uid"]}, "status": status}
            self._kubelet.api.patch(f"{self._path}/status", json=patch, headers=MERGE).raise_for_status()
            self._posted = status

    def _condition(self, condition_type: str, status: str) -> Document:
        if self._conditions.get(condition_type, ("", ""))[0] != status:
            self._conditions[condition_type] = (status, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
        return {
            "type": condition_type,
            "status": status,
            "lastTransitionTime": self._conditions[condition_type][1],
        }


def _status(container: Container, ready: bool) -> Document:
    code = container.exit_code
    if container.restarts < 0:
        state: Document = {"waiting": {"reason": "CreateContainerConfigError"}}
    elif code is None:
        state = {"running": {}}
    else:
        state = {"terminated": {"exitCode": code & 0xFF}}
    return {
        "name": container.name,
        "ready": ready,
        "started": code is None,
        "restartCount": max(0, container.restarts),
        "image": container.spec.get("image", ""),
        "imageID": "",
        "state": state,
    }
