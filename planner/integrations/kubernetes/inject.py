"""What becomes of a Pod that asks for rfork: its document as it is to be created. Pure.

Runs in the webhook's process, for each CREATE, and again where another webhook changed the Pod after us
(``reinvocationPolicy: IfNeeded``): by then the API server has filled in defaults, and sidecars have come. So
nothing is compared with what we would write: what is there *by name* stays, whoever wrote it. What would be
added twice (the grace period), or depends on the moment (the readiness gate), is added only where the Pod has
no annotation `names.INJECTED` yet.

Of several Pods that are one server (a LeaderWorkerSet's group) each has its own RFORK_REPLICA. That holds for
draining too: each Pod's preStop sees off the readers of its own ranks, which are those that end with it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import rfork
from planner.integrations.kubernetes import injection_files, names
from planner.integrations.kubernetes.env_vars import FOLDER, SOCKETS, TLS, environment, includes, python_path
from planner.integrations.kubernetes.manifests import Document
from planner.integrations.kubernetes.pod_request import Files, InjectionRequest
from rfork.engine_command import ALLOWLISTS, LOAD_FORMAT, EngineName, load_format, plugin_allowlist
from rfork.settings import KubernetesSettings

SOCKETS_VOLUME: Final = "rfork-sockets"
TLS_VOLUME: Final = "rfork-tls"
GRACE_S: Final = 30
"""Kubernetes' own terminationGracePeriodSeconds."""


def inject(
    pod: Mapping[str, Any],
    request: InjectionRequest,
    settings: KubernetesSettings,
    planner_url: str,
    *,
    has_leader: bool = False,
) -> tuple[Document, tuple[str, ...]]:
    """The Pod as it is to be, and what could not be done, one sentence each; `pod` stays as it was.

    `pod` is the one that `request` was read off. Given its own result, with whatever others added, it returns
    that, whatever `has_leader` is by then: whether a controller leads now, for a Pod whose readiness gate nobody
    opens is never ready. Raises SettingsError where rfork would not be found by the engine, which then must
    not be asked for, or where the cluster does not know what would bring it.

    With ``same-host: ipc`` the Pod gets the node's IPC and PID namespaces, which cuda_ipc needs for memory of
    cudaMalloc: they let it see all processes of the node, so no setting does that, only the Pod's own
    annotation. Where PodSecurity forbids host namespaces, or hostPath volumes, such a Pod is refused by the
    API server: do not ask for them there. The kubelet makes the sockets' folder as root's; for other users
    somebody has to open it, or forks go over the network.
    """
    patch = _PodPatch(pod, request)
    files_at = patch.files(request.files or settings.injection_mode, settings.injection_image, settings.image_volumes)
    drains = patch.drain(settings.drain_timeout_s if request.drain_s is None else request.drain_s, files_at)
    same_host = request.same_host or ("true" if settings.same_host else "false")
    if same_host != "false":
        patch.sockets()
    if same_host == "ipc":
        patch.host_namespaces()
    if settings.tls_secret:
        patch.tls(settings.tls_secret)
    if settings.readiness_gate and has_leader:
        patch.gate()
    patch.probe()
    patch.variables(
        environment(request, settings, planner_url, same_host=same_host != "false", drains=drains), files_at
    )
    patch.command()
    return patch.finish(), tuple(patch.notes)


class _PodPatch:
    """A copy of one Pod while it is changed."""

    def __init__(self, pod: Mapping[str, Any], request: InjectionRequest) -> None:
        self.pod: Document = copy.deepcopy(dict(pod))
        self.notes: list[str] = []
        self._request = request
        self._spec: Document = self.pod["spec"]
        self._container: Document = next(each for each in self._spec["containers"] if each["name"] == request.container)
        self._annotations = _object(self.pod["metadata"], "annotations")
        self._is_reinjection = names.INJECTED in self._annotations

    def files(self, injection_mode: Files, image: str, image_volumes: bool) -> str | None:
        """Bring rfork's files in; the folder that they lie in, None where the image is said to have rfork.

        What is in the image is not known here. With ``none`` and an image without rfork the engine ends as
        it starts, for it refuses `--load-format rfork`: who cannot be sure takes ``init``.
        """
        if injection_mode == "none":
            return None
        mounted = self._mounted(
            injection_files.volume(injection_mode, image, image_volumes),
            FOLDER,
            read_only=injection_mode == "image",
        )
        if mounted and injection_mode == "init":
            runs_as_root = (self._spec.get("securityContext") or {}).get("runAsUser") == 0
            _list(self._spec, "initContainers").append(injection_files.init_container(image, runs_as_root=runs_as_root))
        return injection_files.folder(injection_mode)

    def drain(self, seconds: float, files_at: str | None) -> bool:
        """Have the container wait for its readers before it is told to end; False: it does not.

        A hook that fails costs nothing: the container ends as it would have. Kubernetes expands no
        references in hooks, so the command reads RFORK_REPLICA itself. Files may lie where nothing can be
        executed, so the shell reads them.
        """
        if seconds <= 0:
            return False
        command = ["/bin/sh", f"{files_at}/bin/rfork"] if files_at else ["rfork"]
        hook = {"exec": {"command": [*command, "drain", "--own", "--wait", f"{seconds:g}"]}}
        lifecycle = self._container.get("lifecycle") or {}
        if existing := lifecycle.get("preStop"):
            if not includes(existing, hook) and not self._is_reinjection:
                self._note(
                    f"container {self._request.container} has a preStop hook of its own: have it call "
                    "`rfork drain --own`, or readers are waited for only as the server ends"
                )
            return includes(existing, hook)
        self._container["lifecycle"] = {**lifecycle, "preStop": hook}
        if not self._is_reinjection:
            before = self._spec.get("terminationGracePeriodSeconds")
            self._spec["terminationGracePeriodSeconds"] = math.ceil(seconds) + (GRACE_S if before is None else before)
        return True

    def sockets(self) -> None:
        """A folder of the node that all its Pods see, for the sockets by which same-host transports meet."""
        self._mounted({"name": SOCKETS_VOLUME, "hostPath": {"path": SOCKETS, "type": "DirectoryOrCreate"}}, SOCKETS)

    def host_namespaces(self) -> None:
        """The node's IPC and PID namespaces, unless no API server would take the Pod then."""
        if self._spec.get("hostUsers") is False or self._spec.get("shareProcessNamespace"):
            self._note(
                "hostIPC and hostPID go neither with hostUsers: false nor with shareProcessNamespace: "
                "cuda_ipc reads memory of cudaMalloc within this Pod only"
            )
            return
        self._spec["hostIPC"] = True
        self._spec["hostPID"] = True

    def tls(self, secret: str) -> None:
        """The Secret's files. Optional: without it the server starts, and says why it cannot be forked."""
        self._mounted({"name": TLS_VOLUME, "secret": {"secretName": secret, "optional": True}}, TLS, True)

    def gate(self) -> None:
        """The Pod is ready once the controller says that its weights are.

        One that was changed before keeps what it got then, for whether a controller leads may have changed.
        """
        if self._is_reinjection:
            return
        gates = _list(self._spec, "readinessGates")
        if not any(gate["conditionType"] == names.WEIGHTS_READY for gate in gates):
            gates.append({"conditionType": names.WEIGHTS_READY})

    def probe(self) -> None:
        """Say so where nobody tells Kubernetes when the engine answers; what runs PyTorch need not answer."""
        if self._request.engine == "pytorch" or self._container.get("readinessProbe") or self._is_reinjection:
            return
        self._note(
            f"container {self._request.container} has no readinessProbe, so the Pod counts as ready before "
            "the engine answers: give it one that asks the engine's /health"
        )

    def variables(self, injected: Iterable[Document], files_at: str | None) -> None:
        """The environment, behind what is there; of that only Python's path and plug-in lists are changed."""
        existing = _list(self._container, "env")
        kept: list[str] = []
        for variable in injected:
            own = next((each for each in existing if each["name"] == variable["name"]), None)
            if own is None:
                existing.append(variable)
            elif not includes(own, variable):
                kept.append(variable["name"])
        if kept and not self._is_reinjection:
            self._note(f"left as the Pod sets them: {', '.join(kept)}")
        if "RFORK_REPLICA" in kept and not self._is_reinjection:
            self._note("with an RFORK_REPLICA of its own the Pod's instances are not known as this Pod's")
        if files_at is not None:
            self._container["env"] = python_path(existing, f"{files_at}/path", self._note)
        if self._request.engine != "pytorch":
            self._passthrough_env(self._request.engine)

    def _passthrough_env(self, engine: EngineName) -> None:
        allowlist = ALLOWLISTS[engine]
        for variable in self._container["env"]:
            if variable["name"] != allowlist:
                continue
            if variable.get("valueFrom"):
                self._note(f"{allowlist} is set from elsewhere: it has to name {LOAD_FORMAT}")
            else:
                variable["value"] = plugin_allowlist(engine, variable.get("value") or "")

    def command(self) -> None:
        """The load format, as the last arguments."""
        words = [*(self._container.get("command") or ()), *(self._container.get("args") or ())]
        if self._request.engine == "pytorch" or load_format(words) is not None:
            return
        into = "args" if self._container.get("args") or not self._container.get("command") else "command"
        self._container[into] = [*(self._container.get(into) or ()), "--load-format", LOAD_FORMAT]

    def finish(self) -> Document:
        """The Pod, marked as changed."""
        before = self._annotations.pop(names.NOTES, "") if self._is_reinjection else ""
        self._annotations.pop(names.NOTES, None)
        self._annotations.pop(names.REJECTED, None)
        self._annotations[names.INJECTED] = rfork.__version__
        self.notes = [note for note in self.notes if note not in before.split("\n")]
        if notes := [*filter(None, before.split("\n")), *self.notes]:
            self._annotations[names.NOTES] = "\n".join(notes)
        return self.pod

    def _mounted(self, volume: Document, path: str, read_only: bool = False) -> bool:
        """Mount the volume in the engine's container; False: there is one already, which is used as it is."""
        name = volume["name"]
        mounts = _list(self._container, "volumeMounts")
        mounted = next((each for each in mounts if each["mountPath"].rstrip("/") == path), None)
        if mounted is not None and (mounted["name"] != name or self._is_reinjection):
            if mounted["name"] != name:
                self._note(f"what the container mounts at {path} is used as it is")
            return False
        if mounted is None:
            mount = {"name": name, "mountPath": path}
            mounts.append({**mount, "readOnly": True} if read_only else mount)
        volumes = _list(self._spec, "volumes")
        if any(each["name"] == name for each in volumes):
            if not self._is_reinjection:
                self._note(f"the Pod's own volume {name} is used as it is")
            return False
        volumes.append(volume)
        return True

    def _note(self, note: str) -> None:
        self.notes.append(note)


def _list(holder: Document, key: str) -> list[Document]:
    """The list at a key, which is made where there is none."""
    if holder.get(key) is None:
        holder[key] = []
    found: list[Document] = holder[key]
    return found


def _object(holder: Document, key: str) -> Document:
    if holder.get(key) is None:
        holder[key] = {}
    found: Document = holder[key]
    return found
