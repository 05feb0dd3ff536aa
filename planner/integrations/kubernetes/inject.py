"""Injects rfork into a Pod's document: environment, files, hooks, volumes and gate. Pure.

Runs in the webhook's process for each CREATE, and again if another webhook changed the Pod afterwards
(``reinvocationPolicy: IfNeeded``); by then the API server has filled in defaults and sidecars may have been
added. So entries are compared by name only: existing entries stay. Additions that must
happen once (the grace period) or that depend on the moment (the readiness gate) are made only if the Pod has
no annotation `names.INJECTED` yet.

If several Pods form one server (a LeaderWorkerSet's group), each has its own RFORK_REPLICA, and each Pod's
preStop hook waits for the readers of its own ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import rfork
from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import Document
from planner.integrations.kubernetes.pod_request import InjectionMode, InjectionRequest
from rfork.engine_command import ALLOWLISTS, LOAD_FORMAT, EngineName, load_format, plugin_allowlist
from rfork.errors import SettingsError
from rfork.settings import KubernetesSettings

Variable = Document
"""An entry of a container's `env`."""

FILES_DIR: Final = "/opt/rfork"
"""Mount path of rfork's files."""
SOCKET_DIR: Final = "/run/rfork"
"""Directory of the sockets that instances on a node share; the same path on the node and in its Pods."""
TLS_DIR: Final = "/etc/rfork/tls"
TOKEN_KEY: Final = "token"
"""Key in the Secret `KubernetesSettings.token_secret`."""
PYTHON_PATH: Final = "PYTHONPATH"
OWN_PYTHON_PATH: Final = "RFORK_OWN_PYTHONPATH"
"""Original value of PYTHONPATH, if the Pod sets it with `valueFrom`."""
FILES_IN_IMAGE: Final = "/opt/rfork/files"
"""Path of rfork's files in the image `KubernetesSettings.injection_image`."""
FILES_VOLUME: Final = "rfork-files"
INIT_CONTAINER: Final = "rfork-files"
INIT_MOUNT_PATH: Final = "/target"
"""Mount path in the init container: at `FILES_DIR` the volume would hide the image's own files."""
NON_ROOT_UID: Final = 65532
"""User of the init container in a Pod that runs as root. Otherwise the Pod's or the image's user applies."""
SOCKETS_VOLUME: Final = "rfork-sockets"
TLS_VOLUME: Final = "rfork-tls"
DEFAULT_GRACE_PERIOD_S: Final = 30
"""Kubernetes' default terminationGracePeriodSeconds."""


def environment(
    request: InjectionRequest,
    settings: KubernetesSettings,
    planner_url: str,
    *,
    same_host: bool,
    drains: bool,
) -> Iterator[Variable]:
    """Yield the variables, ordered so that each refers only to earlier ones.

    With `hostNetwork`, the Pod shares the node's address and ports: further instances on the node use the
    next free ports (RFORK_PORT_RANGE_SIZE). Annotations that are set at binding are empty if unknown, which
    counts as unset.
    """
    yield _value("RFORK_PLANNER", planner_url)
    yield _value("RFORK_MODEL", request.model)
    if request.version is not None:
        yield _value("RFORK_VERSION", request.version)
    yield _field("RFORK_REPLICA", "metadata.uid")
    yield _field("RFORK_POD_NAMESPACE", "metadata.namespace")
    yield _field("RFORK_POD_NAME", "metadata.name")
    yield {"name": "RFORK_POD", "value": "$(RFORK_POD_NAMESPACE)/$(RFORK_POD_NAME)"}
    yield _field("RFORK_NODE_NAME", "spec.nodeName")
    yield _field("RFORK_BIND", "status.podIP")
    yield _field("RFORK_ADVERTISE", "status.podIP")
    yield _value("RFORK_PEER_PORT", str(settings.peer_port))
    yield _value("RFORK_HTTP_PORT", str(settings.http_port))
    yield _value("RFORK_PORT_RANGE_SIZE", str(settings.port_range_size))
    yield _field("RFORK_ZONE", f"metadata.annotations['{names.ZONE}']")
    yield _field("RFORK_RACK", f"metadata.annotations['{names.RACK}']")
    yield _field("RFORK_NVLINK", f"metadata.annotations['{names.NVLINK}']")
    token = {"name": settings.token_secret, "key": TOKEN_KEY, "optional": True}
    yield {"name": "RFORK_TOKEN", "valueFrom": {"secretKeyRef": token}}
    if settings.tls_secret:
        yield _value("RFORK_TLS_CERTIFICATE", f"{TLS_DIR}/tls.crt")
        yield _value("RFORK_TLS_KEY", f"{TLS_DIR}/tls.key")
        yield _value("RFORK_TLS_CA", f"{TLS_DIR}/ca.crt")
    if request.snapshot is not None:
        # Not escaped: $(BUCKET) in the annotation refers to the container's variable.
        yield {"name": "RFORK_SNAPSHOT", "value": request.snapshot}
    if request.fail_if_not_forked:
        yield _value("RFORK_FAIL_IF_NOT_FORKED", "1")
    if same_host:
        yield _value("RFORK_UNIX_SOCKET_DIR", SOCKET_DIR)
    if drains:
        yield _value("RFORK_DRAIN_TIMEOUT_S", "0")  # the preStop hook has already waited for the readers


def python_path(variables: Iterable[Variable], folder: str, note: Callable[[str], None]) -> list[Variable]:
    """Return the variables with the directory first in PYTHONPATH. Idempotent.

    A `valueFrom` cannot be extended: it is kept under another name and referenced. A PYTHONPATH from the
    image or from `envFrom` is unknown here and gets replaced.
    """
    entries: list[Variable] = []
    found = False
    for variable in variables:
        if variable["name"] != PYTHON_PATH:
            entries.append(variable)
            continue
        found = True
        before = variable.get("value") or ""
        if variable.get("valueFrom"):
            note(f"{PYTHON_PATH} is set with valueFrom: its value is kept as {OWN_PYTHON_PATH}, after rfork's own path")
            entries.append({**variable, "name": OWN_PYTHON_PATH})
            before = f"$({OWN_PYTHON_PATH})"
        if folder not in before.split(":"):
            before = f"{folder}:{before}" if before else folder
        entries.append({"name": PYTHON_PATH, "value": before})
    return entries if found else [*entries, {"name": PYTHON_PATH, "value": folder}]


def includes(existing: object, injected: object) -> bool:
    """Return True if a document contains everything of ours. It may contain more, such as defaults."""
    if isinstance(existing, Mapping) and isinstance(injected, Mapping):
        return all(key in existing and includes(existing[key], value) for key, value in injected.items())
    return existing == injected


def _value(name: str, value: str) -> Variable:
    # Kubernetes expands $$ to $, and $(NAME) to a variable.
    return {"name": name, "value": value.replace("$", "$$")}


def _field(name: str, path: str) -> Variable:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def files_volume(injection_mode: Literal["init", "image"], image: str, *, image_volumes: bool) -> Document:
    """Return the volume with the files. Raises SettingsError if it cannot be provided.

    `image_volumes`: the cluster is known to support volumes that are images.
    """
    if not image:
        raise SettingsError(
            "no image with rfork's files is configured",
            hint="set RFORK_K8S_INJECTION_IMAGE for the webhook, or "
            f"{names.INJECTION_MODE}: none if the image contains rfork",
        )
    if injection_mode == "image" and not image_volumes:
        raise SettingsError(
            "this cluster is not known to support image volumes",
            hint=f"set {names.INJECTION_MODE}: init, or RFORK_K8S_IMAGE_VOLUMES=true for the webhook "
            "(Kubernetes 1.35 or newer)",
        )
    if injection_mode == "image":
        return {"name": FILES_VOLUME, "image": {"reference": image}}
    return {"name": FILES_VOLUME, "emptyDir": {}}


def files_dir_in_container(injection_mode: Literal["init", "image"]) -> str:
    """Return the directory of the files in the engine's container.

    The complete image is mounted, because some runtimes (containerd 2.0) ignore subPath.
    """
    return f"{FILES_DIR}{FILES_IN_IMAGE}" if injection_mode == "image" else FILES_DIR


def files_init_container(image: str, *, runs_as_root: bool) -> Document:
    """Return the init container that copies the files. `runs_as_root`: the Pod's containers run as root."""
    security: Document = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if runs_as_root:
        security["runAsUser"] = NON_ROOT_UID
    # Requests equal to the limits keep a Pod in the QoS class Guaranteed.
    resources = {"cpu": "100m", "memory": "64Mi"}
    return {
        "name": INIT_CONTAINER,
        "image": image,
        "command": ["cp", "-R", f"{FILES_IN_IMAGE}/.", INIT_MOUNT_PATH],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": security,
        "volumeMounts": [{"name": FILES_VOLUME, "mountPath": INIT_MOUNT_PATH}],
    }


def inject(
    pod: Mapping[str, Any],
    request: InjectionRequest,
    settings: KubernetesSettings,
    planner_url: str,
    *,
    has_leader: bool = False,
) -> tuple[Document, tuple[str, ...]]:
    """Return the injected Pod, and one sentence for each thing that could not be done. `pod` is not modified.

    `request` was parsed from `pod`. Applied to its own result, with any additions of others, it returns the
    same again, whatever `has_leader` is by then. `has_leader`: a controller leads now; without one, nothing
    would open the readiness gate. Raises SettingsError if the engine would not find rfork, or if the cluster
    does not support the injection mode.

    ``same-host: ipc`` also sets the node's IPC and PID namespaces, which cuda_ipc needs for memory of
    cudaMalloc. They expose all processes of the node, so only the Pod's own annotation can set them. If
    PodSecurity forbids host namespaces or hostPath volumes, the API server rejects such a Pod. The kubelet
    creates the socket directory as root; for other users it must be made writable, or forks use the network.
    """
    patch = _PodPatch(pod, request)
    files_dir = patch.add_files(
        request.injection_mode or settings.injection_mode, settings.injection_image, settings.image_volumes
    )
    drains = patch.add_drain_hook(
        settings.drain_timeout_s if request.drain_timeout_s is None else request.drain_timeout_s, files_dir
    )
    same_host = request.same_host or ("true" if settings.same_host else "false")
    if same_host != "false":
        patch.mount_sockets()
    if same_host == "ipc":
        patch.set_host_namespaces()
    if settings.tls_secret:
        patch.mount_tls(settings.tls_secret)
    if settings.readiness_gate and has_leader:
        patch.add_readiness_gate()
    patch.check_probe()
    patch.add_env(environment(request, settings, planner_url, same_host=same_host != "false", drains=drains), files_dir)
    patch.add_load_format()
    return patch.finish(), tuple(patch.notes)


class _PodPatch:
    """Working copy of one Pod."""

    def __init__(self, pod: Mapping[str, Any], request: InjectionRequest) -> None:
        self.pod: Document = copy.deepcopy(dict(pod))
        self.notes: list[str] = []
        self._request = request
        self._spec: Document = self.pod["spec"]
        self._container: Document = next(each for each in self._spec["containers"] if each["name"] == request.container)
        self._annotations = _object(self.pod["metadata"], "annotations")
        self._is_reinjection = names.INJECTED in self._annotations

    def add_files(self, injection_mode: InjectionMode, image: str, image_volumes: bool) -> str | None:
        """Add rfork's files and return their directory. None: the image contains rfork.

        The image's contents are unknown here. With ``none`` and an image without rfork, the engine exits at
        its start, because it rejects `--load-format rfork`; if unsure, use ``init``.
        """
        if injection_mode == "none":
            return None
        mounted = self._mount(
            files_volume(injection_mode, image, image_volumes=image_volumes),
            FILES_DIR,
            read_only=injection_mode == "image",
        )
        if mounted and injection_mode == "init":
            runs_as_root = (self._spec.get("securityContext") or {}).get("runAsUser") == 0
            _list(self._spec, "initContainers").append(files_init_container(image, runs_as_root=runs_as_root))
        return files_dir_in_container(injection_mode)

    def add_drain_hook(self, seconds: float, files_dir: str | None) -> bool:
        """Add a preStop hook that waits for the readers. Returns False if there is none.

        A failing hook is harmless: the container ends as without it. Kubernetes does not expand references in
        hooks, so the command reads RFORK_REPLICA itself. The volume may be mounted noexec, so the shell runs
        the script.
        """
        if seconds <= 0:
            return False
        command = ["/bin/sh", f"{files_dir}/bin/rfork"] if files_dir else ["rfork"]
        hook = {"exec": {"command": [*command, "drain", "--own", "--wait", f"{seconds:g}"]}}
        lifecycle = self._container.get("lifecycle") or {}
        if existing := lifecycle.get("preStop"):
            if not includes(existing, hook) and not self._is_reinjection:
                self._note(
                    f"container {self._request.container} has its own preStop hook: call `rfork drain --own` "
                    "there, or the server waits for readers only while it shuts down"
                )
            return includes(existing, hook)
        self._container["lifecycle"] = {**lifecycle, "preStop": hook}
        if not self._is_reinjection:
            before = self._spec.get("terminationGracePeriodSeconds")
            self._spec["terminationGracePeriodSeconds"] = math.ceil(seconds) + (
                DEFAULT_GRACE_PERIOD_S if before is None else before
            )
        return True

    def mount_sockets(self) -> None:
        """Mount a directory of the node, shared by its Pods, for the sockets of same-host transports."""
        self._mount({"name": SOCKETS_VOLUME, "hostPath": {"path": SOCKET_DIR, "type": "DirectoryOrCreate"}}, SOCKET_DIR)

    def set_host_namespaces(self) -> None:
        """Set the node's IPC and PID namespaces, unless the API server would reject the Pod."""
        if self._spec.get("hostUsers") is False or self._spec.get("shareProcessNamespace"):
            self._note(
                "hostIPC and hostPID are incompatible with hostUsers: false and with shareProcessNamespace: "
                "cuda_ipc can share memory of cudaMalloc within this Pod only"
            )
            return
        self._spec["hostIPC"] = True
        self._spec["hostPID"] = True

    def mount_tls(self, secret: str) -> None:
        """Mount the TLS Secret. Optional: without it the server starts and reports why it cannot be forked."""
        self._mount({"name": TLS_VOLUME, "secret": {"secretName": secret, "optional": True}}, TLS_DIR, True)

    def add_readiness_gate(self) -> None:
        """Add the readiness gate, which the controller opens.

        Not on reinjection, because the leadership may have changed since the first injection.
        """
        if self._is_reinjection:
            return
        gates = _list(self._spec, "readinessGates")
        if not any(gate["conditionType"] == names.WEIGHTS_READY for gate in gates):
            gates.append({"conditionType": names.WEIGHTS_READY})

    def check_probe(self) -> None:
        """Add a note if Kubernetes cannot know when the engine serves. PyTorch programs need no probe."""
        if self._request.engine == "pytorch" or self._container.get("readinessProbe") or self._is_reinjection:
            return
        self._note(
            f"container {self._request.container} has no readinessProbe, so the Pod counts as ready before "
            "the engine responds: add a probe of the engine's /health"
        )

    def add_env(self, injected: Iterable[Document], files_dir: str | None) -> None:
        """Append the environment. Of existing variables, only Python's path and plug-in lists are changed."""
        existing = _list(self._container, "env")
        kept: list[str] = []
        for variable in injected:
            own = next((each for each in existing if each["name"] == variable["name"]), None)
            if own is None:
                existing.append(variable)
            elif not includes(own, variable):
                kept.append(variable["name"])
        if kept and not self._is_reinjection:
            self._note(f"kept as set by the Pod: {', '.join(kept)}")
        if "RFORK_REPLICA" in kept and not self._is_reinjection:
            self._note("the Pod sets its own RFORK_REPLICA, so its instances cannot be matched to this Pod")
        if files_dir is not None:
            self._container["env"] = python_path(existing, f"{files_dir}/path", self._note)
        if self._request.engine != "pytorch":
            self._extend_plugin_allowlist(self._request.engine)

    def _extend_plugin_allowlist(self, engine: EngineName) -> None:
        allowlist = ALLOWLISTS[engine]
        for variable in self._container["env"]:
            if variable["name"] != allowlist:
                continue
            if variable.get("valueFrom"):
                self._note(f"{allowlist} is set with valueFrom: it must include {LOAD_FORMAT}")
            else:
                variable["value"] = plugin_allowlist(engine, variable.get("value") or "")

    def add_load_format(self) -> None:
        """Append the load format to the arguments."""
        command_line = [*(self._container.get("command") or ()), *(self._container.get("args") or ())]
        if self._request.engine == "pytorch" or load_format(command_line) is not None:
            return
        field = "args" if self._container.get("args") or not self._container.get("command") else "command"
        self._container[field] = [*(self._container.get(field) or ()), "--load-format", LOAD_FORMAT]

    def finish(self) -> Document:
        """Mark the Pod as injected and return it."""
        before = self._annotations.pop(names.NOTES, "") if self._is_reinjection else ""
        self._annotations.pop(names.NOTES, None)
        self._annotations.pop(names.REJECTED, None)
        self._annotations[names.INJECTED] = rfork.__version__
        self.notes = [note for note in self.notes if note not in before.split("\n")]
        if notes := [*filter(None, before.split("\n")), *self.notes]:
            self._annotations[names.NOTES] = "\n".join(notes)
        return self.pod

    def _mount(self, volume: Document, path: str, read_only: bool = False) -> bool:
        """Mount the volume in the engine's container. Returns False if there is one, which is left unchanged."""
        name = volume["name"]
        mounts = _list(self._container, "volumeMounts")
        mounted = next((each for each in mounts if each["mountPath"].rstrip("/") == path), None)
        if mounted is not None and (mounted["name"] != name or self._is_reinjection):
            if mounted["name"] != name:
                self._note(f"the container's own mount at {path} is used unchanged")
            return False
        if mounted is None:
            mount = {"name": name, "mountPath": path}
            mounts.append({**mount, "readOnly": True} if read_only else mount)
        volumes = _list(self._spec, "volumes")
        if any(each["name"] == name for each in volumes):
            if not self._is_reinjection:
                self._note(f"the Pod's own volume {name} is used unchanged")
            return False
        volumes.append(volume)
        return True

    def _note(self, note: str) -> None:
        self.notes.append(note)


def _list(holder: Document, key: str) -> list[Document]:
    """Return the list at a key; creates it if missing."""
    if holder.get(key) is None:
        holder[key] = []
    found: list[Document] = holder[key]
    return found


def _object(holder: Document, key: str) -> Document:
    if holder.get(key) is None:
        holder[key] = {}
    found: Document = holder[key]
    return found
