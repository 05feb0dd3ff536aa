"""Parses what a Pod with the label `names.MODEL` requests of rfork, without changing it. Pure.

Runs in the webhook's process before the API server has validated the document, so it may contain anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.engine_container import Engine, engine_of, find_engine_container
from planner.integrations.kubernetes.manifests import PodManifest
from rfork.errors import SettingsError
from rfork.schema import ModelName, Text, WeightsVersion, sanitize_text

InjectionMode = Literal["none", "init", "image"]
SameHost = Literal["true", "false", "ipc"]
Switch = Literal["true", "false"]

MIRROR_POD_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""Set on the mirror of a static Pod, which already runs and cannot be changed."""
MAX_DRAIN_S: Final = 3600.0


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


@dataclass(frozen=True, slots=True)
class InjectionRejected:
    """The Pod requests rfork but cannot be injected."""

    reason: str
    """One sentence for the Pod's owner: the reason, and what to do."""


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


def parse_request(pod: object) -> InjectionRequest | InjectionRejected | None:
    """Return the Pod's request, or why it is rejected. None: it requests nothing. Never raises.

    The engine's container is the one named by the annotation `names.CONTAINER`; else the only one whose
    command starts an engine; else the only one whose image does so by default; else the only container, or
    the one named by `engine_container.DEFAULT_CONTAINER`. For the last two, the annotation `names.ENGINE`
    must name the engine. The kubelet expands references (``$(NAME)``) in command and args.
    """
    if not is_enabled(pod):
        return None
    try:
        return _read(PodManifest.model_validate(pod))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        return _rejection(f"malformed Pod: {path}: {first['msg']}")
    except SettingsError as error:
        return _rejection(f"{error}: {error.hint}" if error.hint else str(error))


def _rejection(reason: str) -> InjectionRejected:
    return InjectionRejected(str(sanitize_text(reason)))


def _read(pod: PodManifest) -> InjectionRequest:
    annotations = pod.metadata.annotations or {}
    if pod.spec.os is not None and pod.spec.os.name == "windows":
        raise SettingsError("rfork runs on Linux only", hint=f"remove the label {names.MODEL}")
    _one_of(annotations, names.INJECT, get_args(Switch))
    engine: Engine | None = _one_of(annotations, names.ENGINE, get_args(Engine))
    container = find_engine_container(pod.spec.containers, annotations, engine)
    return InjectionRequest(
        model=_model(pod.metadata.labels, annotations),
        container=container.name,
        engine=engine_of(container, engine),
        snapshot=_snapshot(annotations),
        injection_mode=_one_of(annotations, names.INJECTION_MODE, get_args(InjectionMode)),
        same_host=_one_of(annotations, names.SAME_HOST, get_args(SameHost)),
        drain_timeout_s=_drain_timeout_s(annotations),
        fail_if_not_forked=_one_of(annotations, names.FAIL_IF_NOT_FORKED, get_args(Switch)) == "true",
        version=_version(pod.metadata.labels, annotations),
    )


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


Choice = TypeVar("Choice", bound=str)


def _one_of(annotations: Mapping[str, str], name: str, values: tuple[Choice, ...]) -> Choice | None:
    """Return the annotation's value, one of `values`, or None if unset. Raises SettingsError."""
    if (value := annotations.get(name)) is None:
        return None
    for choice in values:
        if choice == value:
            return choice
    raise SettingsError(f"{name} is {value}", hint=f"it must be one of {', '.join(values)}")
