"""Installs the chart for a test's namespace with helm, and runs its processes on this machine.

No kubelet runs the chart's own Pods. So each process gets the environment of its container in the chart,
without what only a cluster provides (DNS, mounts), and the ServiceAccount's token. With a `ContainerImage`,
it also gets the container's file system, user and volumes, and finds the API server as in a cluster.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import httpx
from lightkube import Client
from lightkube.resources.core_v1 import Namespace, Secret
from prometheus_client.parser import text_string_to_metric_families

from rfork.planner_client.ownership import OWNER_HEADER
from tests.kube.chart import CHART, environment, helm_run, pod_specs, render
from tests.kube.container_image import SERVICE_ACCOUNT, ContainerImage, Volumes, image_for_all_tests
from tests.kube.control_plane import ControlPlane
from tests.ports import free_ports

API_CLIENTS: Final = ("webhook", "controller")
"""Components with a ServiceAccount token."""
Component = Literal["planner", "webhook", "controller", "scaler"]
READY_S: Final = 60.0
STOP_S: Final = 15.0


class Installation:
    """One release. Not thread-safe."""

    def __init__(
        self,
        plane: ControlPlane,
        admin: Client,
        helm: Path,
        namespace: str,
        folder: Path,
        image: ContainerImage | None = None,
    ) -> None:
        self.release = f"rfork-{namespace}"
        self.namespace = f"{namespace}-rfork"
        """Namespace of the release's own objects, separate from the test's Pods."""
        self.folder = folder
        self._plane, self._admin, self._helm, self._image = plane, admin, helm, image
        ports = dict(zip(("planner", "webhook", "controller", "scaler"), free_ports(4), strict=True))
        self.planner_port, self.webhook_port = free_ports(2)
        self.planner = f"http://127.0.0.1:{self.planner_port}"
        self._health = ports
        self.values: dict[str, Any] = {
            "bind": "127.0.0.1",
            "logs": {"json": False},
            "instances": {"namespaces": [namespace], "plannerUrl": self.planner, "injectionMode": "none"},
            "planner": {"service": {"port": self.planner_port}},
            "webhook": {"port": self.webhook_port, "healthPort": ports["webhook"]},
            "controller": {"healthPort": ports["controller"], "leaseDurationSeconds": 3, "pollIntervalSeconds": 0.5},
            "keda": {"enabled": True, "healthPort": ports["scaler"]},
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._probes: dict[str, str] = {}

    def helm(self, verb: Literal["install", "upgrade", "uninstall"], **changed: Any) -> None:
        """Run `helm VERB` with `values`, and `changed` ones at their top level."""
        words = [verb, self.release, "--namespace", self.namespace]
        words += ["--create-namespace"] if verb == "install" else []
        if verb == "uninstall":
            helm_run(self._helm, *words, kubeconfig=self._plane.kubeconfig)
            return
        url = f"https://127.0.0.1:{self.webhook_port}"
        values = {**self.values, **changed}
        values["webhook"] = {**self.values["webhook"], **values["webhook"], "url": url}
        helm_run(self._helm, *words, str(CHART), values=values, kubeconfig=self._plane.kubeconfig)

    def start(self, component: Component, name: str | None = None, **changed: str) -> None:
        """Start a process of the chart, as `name` if there are several, and wait until it is ready."""
        name = name or component
        specs = pod_specs(render(self._helm, self.values, release=self.release, namespace=self.namespace))
        spec = next(spec for full, spec in specs.items() if full.endswith(component))
        variables = {**self._environment(component, spec), **changed}
        if self._image is None:
            variables |= self._files_on_this_machine(component, variables)
            command = [sys.executable, "-m", "rfork", *spec["containers"][0]["args"]]
            environment = {**os.environ, **variables}
        else:
            variables |= self._api_server_in_a_cluster()
            command = self._confined(self._image, component, spec, name, changed)
            environment = {**self._image.environment, **variables}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        port = self.planner_port if component == "planner" else variables["RFORK_K8S_HEALTH_PORT"]
        self._probes[name] = f"http://127.0.0.1:{port}"
        self._wait_ready(name, f"{self._probes[name]}/readyz")

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Stop all processes."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            process.wait()
        self._processes.clear()

    def process_id(self, name: str) -> int:
        """Return the id of a process."""
        return self._processes[name].pid

    def cpu_s(self, name: str) -> float:
        """Return the CPU seconds used by a process."""
        fields = Path(f"/proc/{self._processes[name].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str, sample: str, **labels: str) -> float:
        """Return a metric of an integration's process: the sum over all samples with these labels."""
        text = httpx.get(f"{self._probes[name]}/metrics", timeout=5, trust_env=False).raise_for_status().text
        return sum(
            each.value
            for family in text_string_to_metric_families(text)
            for each in family.samples
            if each.name == sample and labels.items() <= each.labels.items()
        )

    def log(self, name: str) -> str:
        """Return the output of a process."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def secret(self, name: str, key: str) -> str:
        """Return a value of a Secret in the namespace."""
        found = self._admin.get(Secret, name, namespace=self.namespace)
        return base64.b64decode((found.data or {})[key]).decode()

    def client(self) -> httpx.Client:
        """Return a client of the planner with an operator token."""
        token = self.secret(f"{self.release}-planner", "operator-token")
        return httpx.Client(
            base_url=self.planner,
            headers={"Authorization": f"Bearer {token}", OWNER_HEADER: "o" * 32},
            trust_env=False,
            timeout=10,
        )

    def user(self, component: Component) -> str:
        """Return the user name of the process at the API server."""
        return f"system:serviceaccount:{self.namespace}:{self.release}-{component}"

    def _environment(self, component: Component, spec: dict[str, Any]) -> Mapping[str, str]:
        variables: dict[str, str] = {}
        for name, value in environment(spec).items():
            if value.startswith("<") and "/" in value:
                value = self.secret(*value[1:-1].split("/"))
            variables[name] = value
        variables["POD_NAME"] = f"{component}-{os.getpid()}-{len(self._processes)}"
        variables["RFORK_K8S_WEBHOOK_HOSTS"] = "127.0.0.1,localhost"
        variables["RFORK_PLANNER"] = self.planner
        return variables

    def _files_on_this_machine(self, component: Component, variables: Mapping[str, str]) -> dict[str, str]:
        """Return variables that replace paths of the container."""
        replaced: dict[str, str] = {}
        if tokens := variables.get("RFORK_PLANNER_TOKENS_FILE"):
            file = self.folder / Path(tokens).name
            file.write_text(self.secret(f"{self.release}-planner", "tokens"))
            replaced["RFORK_PLANNER_TOKENS_FILE"] = str(file)
        if component in API_CLIENTS:
            replaced["KUBECONFIG"] = str(self._plane.kubeconfig_for(self.namespace, self._account(component)))
        return replaced

    def _api_server_in_a_cluster(self) -> dict[str, str]:
        """Return the variables that a kubelet sets."""
        server = urlsplit(self._plane.url)
        return {"KUBERNETES_SERVICE_HOST": str(server.hostname), "KUBERNETES_SERVICE_PORT": str(server.port)}

    def _confined(
        self, image: ContainerImage, component: Component, spec: dict[str, Any], name: str, changed: Mapping[str, str]
    ) -> list[str]:
        """Return the command of a process in the image, with its Pod's volumes and the ServiceAccount's token."""
        (container,) = spec["containers"]
        # A directory of the test replaces the volume at the path that its variable had.
        replaced = {value for key, value in environment(spec).items() if Path(changed.get(key, "")).is_absolute()}
        kept = [each for each in container.get("volumeMounts", ()) if each["mountPath"] not in replaced]
        container = {**container, "volumeMounts": kept}
        used = {each["name"] for each in kept}
        volumes = [each for each in spec.get("volumes", ()) if each["name"] in used]
        names = [each["secret"]["secretName"] for each in volumes if "secret" in each]
        secrets = {each: self._admin.get(Secret, each, namespace=self.namespace).data or {} for each in names}
        folder = self.folder / f"{name}-volumes"
        shutil.rmtree(folder, ignore_errors=True)
        mounts = [*Volumes(folder, spec, secrets).mounts(container)]
        if component in API_CLIENTS:
            account = folder / "service-account"
            account.mkdir(parents=True)
            token = self._plane.service_account_token(self.namespace, self._account(component))
            files = {"token": token, "ca.crt": self._plane.ca.read_text(), "namespace": self.namespace}
            for file, text in files.items():
                (account / file).write_text(text)
            mounts.append((account, SERVICE_ACCOUNT, True))
        # Directories of the test.
        mounts += [(Path(value), value, True) for value in changed.values() if Path(value).is_dir()]
        return image.launcher(spec, container, mounts)

    def _account(self, component: Component) -> str:
        return f"{self.release}-{component}"

    def _wait_ready(self, name: str, url: str) -> None:
        process, until = self._processes[name], time.monotonic() + READY_S
        last_response = ""
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                response = httpx.get(url, timeout=5, trust_env=False)
                last_response = response.text
                if response.status_code == 200:
                    return
            time.sleep(0.05)  # poll interval
        raise RuntimeError(f"{name} is not ready: {last_response}\n{self.log(name)[-3000:]}")


@contextlib.contextmanager
def installed(
    plane: ControlPlane,
    admin: Client,
    helm: Path,
    namespace: str,
    folder: Path,
    image: ContainerImage | None = None,
) -> Iterator[Installation]:
    """Install the chart without starting processes; uninstall it at the end, so that no webhook is left."""
    made = Installation(plane, admin, helm, namespace, folder, image or image_for_all_tests())
    made.helm("install")
    try:
        yield made
    finally:
        made.stop()
        made.helm("uninstall")
        admin.delete(Namespace, made.namespace)
