"""Parses what a Pod with the label `names.MODEL` requests of rfork, without changing it. Pure.

Runs in the webhook's process before the API server has validated the document, so it may contain anything.
The models below describe what `parse_request` reads and `inject` changes; other documents are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from planner.integrations.kubernetes import names
from rfork.engine_command import LOAD_FORMAT, SHELLS, EngineCommand, EngineName, load_format, parse_engine_command
from rfork.errors import SettingsError
from rfork.schema import ModelName, Text, WeightsVersion, sanitize_text

Engine = Literal["vllm", "sglang", "pytorch"]
DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
"""Set by webhooks that add sidecars (such as Istio's): the original container."""
IMAGE_ENTRYPOINT: Final = (
    "write the engine's command (vllm serve …, sglang serve …, python3 -m sglang.launch_server …) as "
    f"command and args, or add --load-format rfork yourself and set {names.ENGINE}: pytorch"
)
InjectionMode = Literal["none", "init", "image"]
SameHost = Literal["true", "false", "ipc"]
Switch = Literal["true", "false"]
MIRROR_POD_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""Set on the mirror of a static Pod, which already runs and cannot be changed."""
MAX_DRAIN_S: Final = 3600.0
Choice = TypeVar("Choice", bound=str)


class ManifestPart(BaseModel):
    """Part of a document. Other fields are not validated."""

    # Strict: no conversions, because a document that the API server would reject must not be repaired here.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Named(ManifestPart):
    name: str


class _Gate(ManifestPart):
    conditionType: str


class _Mount(_Named):
    mountPath: str


class _Variable(_Named):
    value: str | None = None
    valueFrom: dict[str, Any] | None = None


class _Lifecycle(ManifestPart):
    preStop: dict[str, Any] | None = None


class ContainerManifest(_Named):
    """A container."""

    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[_Variable] | None = None
    volumeMounts: list[_Mount] | None = None
    lifecycle: _Lifecycle | None = None


class _System(ManifestPart):
    name: str | None = None


class _Security(ManifestPart):
    runAsUser: int | None = None


class _Spec(ManifestPart):
    containers: list[ContainerManifest] = Field(min_length=1)
    initContainers: list[_Named] | None = None
    volumes: list[_Named] | None = None
    readinessGates: list[_Gate] | None = None
    terminationGracePeriodSeconds: int | None = Field(None, ge=0, le=1 << 31)
    securityContext: _Security | None = None
    hostIPC: bool | None = None
    hostPID: bool | None = None
    hostUsers: bool | None = None
    shareProcessNamespace: bool | None = None
    os: _System | None = None


class _Metadata(ManifestPart):
    labels: dict[str, str]
    annotations: dict[str, str] | None = None


class PodManifest(ManifestPart):
    """A Pod."""

    metadata: _Metadata
    spec: _Spec


def find_engine_container(
    containers: Sequence[ContainerManifest], annotations: Mapping[str, str], engine: Engine | None
) -> ContainerManifest:
    """Return the container named by the annotation `names.CONTAINER`, else find it by commands and images.

    `engine` is the engine that the Pod states, if any. See `parse_request`. Raises SettingsError.
    """
    by_name = {container.name: container for container in containers}
    listed = ", ".join(by_name)
    if len(by_name) < len(containers):
        raise SettingsError(f"two containers have the same name ({listed})", hint="use unique container names")
    if (name := annotations.get(names.CONTAINER)) is not None:
        if name in by_name:
            return by_name[name]
        raise SettingsError(f"there is no container {name}", hint=f"{names.CONTAINER} must name one of {listed}")
    if engine != "pytorch":
        for engine_containers in (
            [each for each in containers if _served(each) is not None],
            [each for each in containers if _by_image(each) is not None],
        ):
            if len(engine_containers) == 1:
                return engine_containers[0]
            if engine_containers:
                both = " and ".join(each.name for each in engine_containers)
                raise SettingsError(
                    f"several containers start an engine ({both})",
                    hint=f"name one of them in the annotation {names.CONTAINER}",
                )
    if len(containers) == 1:
        return containers[0]
    if (default := by_name.get(annotations.get(DEFAULT_CONTAINER, ""))) is not None:
        return default
    shell_containers = next(
        (f" ({each.name}: {_unsupported_reason(each)})" for each in containers if _starts_with_a_shell(each)),
        "",
    )
    raise SettingsError(
        f"no command of the containers {listed} starts vLLM or SGLang{shell_containers}"
        if engine != "pytorch"
        else f"the engine's container is ambiguous: {listed}",
        hint=f"name the engine's container in the annotation {names.CONTAINER}; if it uses the image's own "
        f"command, also name the engine in {names.ENGINE}",
    )


def engine_of(container: ContainerManifest, declared: Engine | None) -> Engine:
    """Return the engine that the container starts. Raises SettingsError if it cannot be forked."""
    if declared == "pytorch":
        return declared
    found = _served(container)
    engine: EngineName | None = found.engine if found else declared if declared else _by_image(container)
    if declared and engine != declared:
        raise SettingsError(
            f"container {container.name} starts {engine}, not {declared}", hint=f"correct {names.ENGINE}"
        )
    if found is None and (engine is None or container.command or _starts_with_a_shell(container)):
        raise SettingsError(f"container {container.name}: {_unsupported_reason(container)}", hint=IMAGE_ENTRYPOINT)
    if engine is None or not _words(container):
        raise SettingsError(
            f"container {container.name} has neither command nor args, and added arguments would "
            "replace those of the image",
            hint="write the engine's arguments as args",
        )
    arguments = _words(container)[found.at if found else 0 :]
    if (chosen := load_format(arguments)) not in (None, LOAD_FORMAT):
        raise SettingsError(
            f"container {container.name} sets --load-format {chosen}",
            hint="remove --load-format; if no seed exists, the model loads as without it",
        )
    return engine


def _words(container: ContainerManifest) -> list[str]:
    return [*(container.command or ()), *(container.args or ())]


def _served(container: ContainerManifest) -> EngineCommand | None:
    try:
        return parse_engine_command(_words(container))
    except SettingsError:
        return None


def _unsupported_reason(container: ContainerManifest) -> str:
    if not _words(container):
        return "it uses the image's own command, which is unknown here"
    try:
        parse_engine_command(_words(container))
    except SettingsError as error:
        return str(error)
    return "it starts no engine"  # unreachable: only called for containers that start none


def _by_image(container: ContainerManifest) -> EngineName | None:
    """Return the engine that the image's entrypoint starts with `args`, as far as its name shows.

    ``vllm-openai`` (and ``vllm-openai-…``) is vLLM's own image, whose entrypoint is the server. SGLang's
    image has no entrypoint: an image named ``sglang`` counts only if its arguments begin with an option, as a
    server's do, and not with a program.
    """
    if container.command or not container.args or _starts_with_a_shell(container):
        return None
    image = (container.image or "").partition("@")[0].rpartition("/")[2].partition(":")[0]
    if image == "vllm-openai" or image.startswith("vllm-openai-"):
        return "vllm"
    return "sglang" if image == "sglang" and container.args[0].startswith("-") else None


def _starts_with_a_shell(container: ContainerManifest) -> bool:
    return any(PurePosixPath(word).name in SHELLS for word in _words(container)[:1])


@dataclass(frozen=True, slots=True)
class InjectionRequest:
    """Request to inject rfork into a Pod. For fields that are None, the webhook's setting applies."""

    model: str
    container: str
    """Name of the engine's container."""
    engine: Engine
    """``pytorch``: set the environment only, keep the command."""
    snapshot: str | None = None
    injection_mode: InjectionMode | None = None
    same_host: SameHost | None = None
    """``ipc``: also the node's IPC and PID namespaces."""
    drain_timeout_s: float | None = None
    fail_if_not_forked: bool = False
    version: str | None = None
    """Weights version. None: the instance determines it."""


def is_enabled(pod: object) -> bool:
    """Return True if the Pod has the label and did not opt out."""
    metadata = pod.get("metadata") if isinstance(pod, dict) else None
    if not isinstance(metadata, dict):
        return False
    labels, annotations = metadata.get("labels"), metadata.get("annotations")
    if not isinstance(labels, dict) or names.MODEL not in labels:
        return False
    if not isinstance(annotations, dict):
        return True
    return annotations.get(names.INJECT) != "false" and MIRROR_POD_ANNOTATION not in annotations


def parse_request(pod: object) -> InjectionRequest | None:
    """Return the Pod's request. None: it requests nothing. Raises SettingsError if it cannot be injected.

    The engine's container is the one named by the annotation `names.CONTAINER`; else the only one whose
    command starts an engine; else the only one whose image does so by default; else the only container, or
    the one named by `DEFAULT_CONTAINER`. For the last two, the annotation `names.ENGINE`
    must name the engine. The kubelet expands references (``$(NAME)``) in command and args.
    """
    if not is_enabled(pod):
        return None
    try:
        manifest = PodManifest.model_validate(pod)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise SettingsError(f"malformed Pod: {path}: {first['msg']}") from None
    labels, annotations = manifest.metadata.labels, manifest.metadata.annotations or {}
    if manifest.spec.os is not None and manifest.spec.os.name == "windows":
        raise SettingsError("rfork runs on Linux only", hint=f"remove the label {names.MODEL}")
    _one_of(annotations, names.INJECT, get_args(Switch))
    engine: Engine | None = _one_of(annotations, names.ENGINE, get_args(Engine))
    container = find_engine_container(manifest.spec.containers, annotations, engine)
    return InjectionRequest(
        model=_model(labels, annotations),
        container=container.name,
        engine=engine_of(container, engine),
        snapshot=_snapshot(annotations),
        injection_mode=_one_of(annotations, names.INJECTION_MODE, get_args(InjectionMode)),
        same_host=_one_of(annotations, names.SAME_HOST, get_args(SameHost)),
        drain_timeout_s=_drain_timeout_s(annotations),
        fail_if_not_forked=_one_of(annotations, names.FAIL_IF_NOT_FORKED, get_args(Switch)) == "true",
        version=_version(labels, annotations),
    )


def rejection_reason(error: SettingsError) -> str:
    """Return one line for the Pod's owner: why the Pod is not injected, and what to do."""
    return str(sanitize_text(f"{error}: {error.hint}" if error.hint else str(error)))


def _model(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    path = names.MODEL_NAME if names.MODEL_NAME in annotations else names.MODEL
    name = annotations.get(names.MODEL_NAME, labels[names.MODEL])
    try:
        return TypeAdapter(ModelName).validate_python(name, strict=True)
    except ValidationError:
        raise SettingsError(
            f"{path} is not a valid model name",
            hint=f"set the label {names.MODEL}, or the annotation {names.MODEL_NAME} if the name is not a valid "
            "label value",
        ) from None


def _version(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str | None:
    if (version := annotations.get(names.VERSION, labels.get(names.VERSION))) is None:
        return None
    try:
        return TypeAdapter(WeightsVersion).validate_python(version, strict=True)
    except ValidationError:
        raise SettingsError(
            f"{names.VERSION} is not a valid weights version", hint="use 1 to 256 printable characters"
        ) from None


def _snapshot(annotations: Mapping[str, str]) -> str | None:
    if (uri := annotations.get(names.SNAPSHOT)) is None:
        return None
    try:
        return TypeAdapter(Text).validate_python(uri, strict=True) or None
    except ValidationError:
        raise SettingsError(
            f"{names.SNAPSHOT} is not a URI", hint="e.g. s3://bucket/model or file:///models/model"
        ) from None


def _drain_timeout_s(annotations: Mapping[str, str]) -> float | None:
    if (text := annotations.get(names.DRAIN_TIMEOUT_S)) is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_DRAIN_S:
        raise SettingsError(f"{names.DRAIN_TIMEOUT_S} is {text}", hint=f"it must be seconds, from 0 to {MAX_DRAIN_S:g}")
    return seconds


def _one_of(annotations: Mapping[str, str], name: str, values: tuple[Choice, ...]) -> Choice | None:
    """Return the annotation's value, one of `values`, or None if unset. Raises SettingsError."""
    if (value := annotations.get(name)) is None:
        return None
    for choice in values:
        if choice == value:
            return choice
    raise SettingsError(f"{name} is {value}", hint=f"it must be one of {', '.join(values)}")
