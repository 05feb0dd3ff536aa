"""What a Pod with the label `names.MODEL` asks of rfork: read off its JSON document, without changing it.

Runs in the webhook's process, before the API server has checked the document: it may be anything. Pure.
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
from rfork.schema.types import ModelName, Text, WeightsVersion, sanitize_text

Files = Literal["none", "init", "image"]
SameHost = Literal["true", "false", "ipc"]
Switch = Literal["true", "false"]

MIRROR_POD_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""On what the kubelet shows of a static Pod: it runs already, and nothing changes it."""
MAX_DRAIN_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class InjectionRequest:
    """What is to be done to a Pod. None: as the setting of that name says."""

    model: str
    container: str
    """The name of the engine's container."""
    engine: Engine
    """``pytorch``: the environment only, its command stays."""
    snapshot: str | None = None
    files: Files | None = None
    same_host: SameHost | None = None
    """``ipc``: with the node's IPC and PID namespaces on top."""
    drain_s: float | None = None
    required: bool = False
    version: str | None = None
    """Of the weights; None: the instance finds it out by itself."""


@dataclass(frozen=True, slots=True)
class InjectionRejected:
    """The Pod asks for rfork and cannot have it."""

    reason: str
    """One sentence for its owner: why, and what to do."""


def is_enabled(pod: object) -> bool:
    """Whether it is a Pod with the label, which does not say that it is to be left alone."""
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
    """What the Pod asks for, or why it cannot have it; None: nothing. Never raises, whatever the Pod is.

    The engine's container is the one that the annotation `names.CONTAINER` names; else the only one whose
    command starts an engine; else the only one whose image does so by itself; else the only one there is, or
    the one that `engine_container.DEFAULT_CONTAINER` names: for those the annotation `names.ENGINE` has to
    say what they run. References (``$(NAME)``) in command and args are left to the kubelet.
    """
    if not is_enabled(pod):
        return None
    try:
        return _read(PodManifest.model_validate(pod))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        return _rejection(f"the Pod is not well-formed: {path}: {first['msg']}")
    except SettingsError as error:
        return _rejection(f"{error}: {error.hint}" if error.hint else str(error))


def _rejection(reason: str) -> InjectionRejected:
    return InjectionRejected(str(sanitize_text(reason)))


def _read(pod: PodManifest) -> InjectionRequest:
    annotations = pod.metadata.annotations or {}
    if pod.spec.os is not None and pod.spec.os.name == "windows":
        raise SettingsError("rfork runs on Linux only", hint=f"take the label {names.MODEL} off")
    _one_of(annotations, names.INJECT, get_args(Switch))
    engine: Engine | None = _one_of(annotations, names.ENGINE, get_args(Engine))
    container = find_engine_container(pod.spec.containers, annotations, engine)
    return InjectionRequest(
        model=_model(pod.metadata.labels, annotations),
        container=container.name,
        engine=engine_of(container, engine),
        snapshot=_snapshot(annotations),
        files=_one_of(annotations, names.FILES, get_args(Files)),
        same_host=_one_of(annotations, names.SAME_HOST, get_args(SameHost)),
        drain_s=_drain_s(annotations),
        required=_one_of(annotations, names.REQUIRED, get_args(Switch)) == "true",
        version=_version(pod.metadata.labels, annotations),
    )


def _model(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    path = names.MODEL_NAME if names.MODEL_NAME in annotations else names.MODEL
    name = annotations.get(names.MODEL_NAME, labels[names.MODEL])
    try:
        return TypeAdapter(ModelName).validate_python(name, strict=True)
    except ValidationError:
        raise SettingsError(
            f"{path} holds no name of a model",
            hint=f"name it in the label {names.MODEL}, or, where that cannot say it, in {names.MODEL_NAME}",
        ) from None


def _version(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str | None:
    if (version := annotations.get(names.VERSION, labels.get(names.VERSION))) is None:
        return None
    try:
        return TypeAdapter(WeightsVersion).validate_python(version, strict=True)
    except ValidationError:
        raise SettingsError(
            f"{names.VERSION} holds no version of weights", hint="it has to be 1 to 256 printable characters"
        ) from None


def _snapshot(annotations: Mapping[str, str]) -> str | None:
    if (uri := annotations.get(names.SNAPSHOT)) is None:
        return None
    try:
        return TypeAdapter(Text).validate_python(uri, strict=True) or None
    except ValidationError:
        raise SettingsError(
            f"{names.SNAPSHOT} holds no URI", hint="as in s3://bucket/model or file:///models/model"
        ) from None


def _drain_s(annotations: Mapping[str, str]) -> float | None:
    if (text := annotations.get(names.DRAIN_S)) is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_DRAIN_S:
        raise SettingsError(f"{names.DRAIN_S} is {text}", hint=f"it has to be seconds, from 0 to {MAX_DRAIN_S:g}")
    return seconds


Choice = TypeVar("Choice", bound=str)


def _one_of(annotations: Mapping[str, str], name: str, values: tuple[Choice, ...]) -> Choice | None:
    """The annotation's value, one of `values`; None where it is not set. Raises SettingsError for another."""
    if (value := annotations.get(name)) is None:
        return None
    for choice in values:
        if choice == value:
            return choice
    raise SettingsError(f"{name} is {value}", hint=f"it has to be one of {', '.join(values)}")
