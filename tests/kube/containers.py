"""Runs a container's command as a plain process: environment, probes and hooks as a kubelet does.

A container with a `ContainerImage` runs in its root file system, with its volumes mounted. Another one runs on
this machine: the mount paths of its emptyDirs, and those in `NodeEnvironment.mounts`, are replaced in its values.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.kube.container_image import ContainerImage, Volumes
from tests.kube.control_plane import parent_death_launcher

Document = dict[str, Any]
ROOT: Final = Path(__file__).parents[2]
REFERENCE: Final = re.compile(r"\$(?:\$|\(([-._a-zA-Z][-._a-zA-Z0-9]*)\))")
KEYED_FIELD: Final = re.compile(r"metadata\.(annotations|labels)\['(.+)'\]")


class MissingReference(Exception):
    """A container refers to a Secret, a ConfigMap or a key that does not exist: it cannot start (yet)."""


@dataclass(frozen=True)
class NodeEnvironment:
    """Properties of the "node" for all containers."""

    environment: Mapping[str, str] = field(
        default_factory=lambda: {
            # `python` in a container means this Python.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            # The tested code, if it differs from the installed one.
            **({"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}),
        }
    )
    """Environment of the image."""
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Directories of this machine by mount path: replaced wherever a value contains the path."""


Find = Callable[[str, str], Document | None]
"""Returns the Secret (``secrets``) or ConfigMap (``configmaps``) of a name in the Pod's namespace."""


class Container:
    """One container of a Pod: a sequence of processes."""

    def __init__(
        self,
        pod: Document,
        spec: Document,
        node_environment: NodeEnvironment,
        log: Path,
        volumes: Volumes,
        image: ContainerImage | None = None,
    ) -> None:
        self.name = str(spec["name"])
        self.spec = spec
        self.restarts = -1
        self._pod = pod
        self._node_environment = node_environment
        self._log = log
        self._mounts = list(volumes.mounts(spec))
        self._image = image
        self._environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, find: Find) -> None:
        """Start or restart it. Raises MissingReference, and OSError if the program does not exist."""
        environment = resolve(self.spec, self._pod, find)
        self._environment = {**self._node_environment.environment, "HOSTNAME": self._pod["metadata"]["name"]}
        self._environment |= {name: self._mounted(value) for name, value in environment.items()}
        self.restarts += 1
        if self._image is not None:
            self._environment = {**self._image.environment, **environment}
            self._process = self._popen(self._image.launcher(self._pod["spec"], self.spec, self._mounts), Path("/"))
            return
        self._process = self._run([*self.spec.get("command", ()), *self.spec.get("args", ())], environment)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last process. None while one runs, or if none was started."""
        return self._process.poll() if self._process is not None else None

    def wait(self) -> int:
        """Wait until it has ended."""
        return self._process.wait() if self._process is not None else 0

    def ready(self, client: httpx.Client, address: str) -> bool:
        """Return True if it runs and its readiness probe (httpGet, exec) succeeds."""
        if self._process is None or self._process.poll() is not None:
            return False
        probe = self.spec.get("readinessProbe") or {}
        if "exec" in probe:
            return self._execute(probe["exec"]["command"], float(probe.get("timeoutSeconds", 1)))
        if "httpGet" not in probe:
            return True
        get = probe["httpGet"]
        ports = {port.get("name"): port["containerPort"] for port in self.spec.get("ports", ())}
        where = f"{get.get('host', address)}:{ports.get(get['port'], get['port'])}"
        url = f"{get.get('scheme', 'HTTP').lower()}://{where}{get.get('path', '/')}"
        try:
            return client.get(url, timeout=float(probe.get("timeoutSeconds", 1))).status_code < 400
        except httpx.HTTPError:
            return False

    def stop(self, grace_s: float) -> None:
        """Run its preStop hook, send SIGTERM, wait, and send SIGKILL, all within `grace_s` seconds."""
        process = self._process
        if process is None:
            return
        hook = ((self.spec.get("lifecycle") or {}).get("preStop") or {}).get("exec")
        if hook is not None and process.poll() is None and grace_s > 0:
            self._execute(hook["command"], grace_s)
        if grace_s > 0:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to it and its children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _run(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if not command:
            raise FileNotFoundError("the container has no command, and there is no image to provide one")
        words = [self._mounted(expand(word, environment)) for word in command]
        return self._popen([*parent_death_launcher(), *words], Path(self.spec.get("workingDir") or ROOT))

    def _popen(self, command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                env=self._environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _execute(self, command: Sequence[str], limit_s: float) -> bool:
        """Run a command with the container's environment. Returns True if it succeeds in time."""
        try:
            process = self._run([word.replace("$", "$$") for word in command], {})
        except OSError:
            return False
        try:
            return process.wait(limit_s) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _mounted(self, value: str) -> str:
        own = {path: str(folder) for folder, path, _ in self._mounts}
        for path, folder in {**own, **self._node_environment.mounts}.items():
            value = value.replace(path, folder)
        return value


def resolve(container: Document, pod: Document, find: Find) -> dict[str, str]:
    """Compute a container's variables in order, as the kubelet does. Raises MissingReference."""
    variables: dict[str, str] = {}
    for each in container.get("env") or ():
        source = each.get("valueFrom")
        if source is None:
            variables[each["name"]] = expand(each.get("value", ""), variables)
        elif (value := _from(source, pod, find)) is not None:
            variables[each["name"]] = value
    return variables


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand ``$(NAME)``; ``$$`` becomes ``$``, and unknown names stay as they are."""

    def put(match: re.Match[str]) -> str:
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return REFERENCE.sub(put, text)


def _from(source: Document, pod: Document, find: Find) -> str | None:
    if "fieldRef" in source:
        return _field(source["fieldRef"]["fieldPath"], pod)
    for reference_key, resource in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
        if reference_key in source:
            return _key(source[reference_key], resource, find)
    raise MissingReference(f"this kubelet does not support {sorted(source)}")


def _field(path: str, pod: Document) -> str:
    if keyed := KEYED_FIELD.fullmatch(path):
        return str((pod["metadata"].get(keyed[1]) or {}).get(keyed[2], ""))
    value: Any = pod
    for part in path.split("."):
        value = (value or {}).get(part)
    return str(value or "")


def _key(reference: Document, resource: str, find: Find) -> str | None:
    found = find(resource, reference["name"])
    value = (found or {}).get("data", {}).get(reference["key"])
    if value is not None:
        return base64.b64decode(value).decode() if resource == "secrets" else str(value)
    if reference.get("optional"):
        return None
    raise MissingReference(f"no {reference['key']} in {resource}/{reference['name']}")
