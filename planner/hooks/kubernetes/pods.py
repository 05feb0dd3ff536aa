"""What a Pod with the label `names.MODEL` asks of rfork: read off its JSON document, without changing it.

Runs in the webhook's process, before the API server has checked the document: it may be anything. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Literal, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.shapes import ContainerShape, PodShape
from rfork.commands import LOAD_FORMAT, SHELLS, EngineName, Served, load_format, served
from rfork.errors import SettingsError
from rfork.fields import ModelName, Text, told

Engine = Literal["vllm", "sglang", "pytorch"]
Files = Literal["none", "init", "image"]
SameHost = Literal["true", "false", "ipc"]
Switch = Literal["true", "false"]

MIRROR: Final = "kubernetes.io/config.mirror"
"""On what the kubelet shows of a static Pod: it runs already, and nothing changes it."""
DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
"""Set by webhooks that add sidecars (Istio's): the container that was there before."""
MOST_DRAIN_S: Final = 3600.0
OWN_COMMAND: Final = (
    "write the engine's own command (vllm serve …, sglang serve …, python3 -m sglang.launch_server …) as "
    f"command and args, or add --load-format rfork yourself and set {names.ENGINE}: pytorch"
)


@dataclass(frozen=True, slots=True)
class Wanted:
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


@dataclass(frozen=True, slots=True)
class Refused:
    """The Pod asks for rfork and cannot have it."""

    reason: str
    """One sentence for its owner: why, and what to do."""


def asks(pod: object) -> bool:
    """Whether it is a Pod with the label, which does not say that it is to be left alone."""
    metadata = pod.get("metadata") if isinstance(pod, dict) else None
    if not isinstance(metadata, dict):
        return False
    labels, annotations = metadata.get("labels"), metadata.get("annotations")
    if not isinstance(labels, dict) or names.MODEL not in labels:
        return False
    if not isinstance(annotations, dict):
        return True
    return annotations.get(names.INJECT) != "false" and MIRROR not in annotations


def wanted(pod: object) -> Wanted | Refused | None:
    """What the Pod asks for, or why it cannot have it; None: nothing. Never raises, whatever the Pod is.

    The engine's container is the one that the annotation `names.CONTAINER` names; else the only one whose
    command starts an engine; else the only one whose image does so by itself (`_by_image`); else the only
    one there is, or the one that `DEFAULT_CONTAINER` names: for those the annotation `names.ENGINE` has to
    say what they run. References (``$(NAME)``) in command and args are left to the kubelet.
    """
    if not asks(pod):
        return None
    try:
        return _read(PodShape.model_validate(pod))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return _refused(f"the Pod is not well-formed: {where}: {first['msg']}")
    except SettingsError as error:
        return _refused(f"{error}: {error.hint}" if error.hint else str(error))


def _refused(reason: str) -> Refused:
    return Refused(str(told(reason)))


def _read(pod: PodShape) -> Wanted:
    annotations = pod.metadata.annotations or {}
    if pod.spec.os is not None and pod.spec.os.name == "windows":
        raise SettingsError("rfork runs on Linux only", hint=f"take the label {names.MODEL} off")
    _one_of(annotations, names.INJECT, get_args(Switch))
    engine: Engine | None = _one_of(annotations, names.ENGINE, get_args(Engine))
    container = _engines_container(pod.spec.containers, annotations, engine)
    return Wanted(
        model=_model(pod.metadata.labels, annotations),
        container=container.name,
        engine=_engine_of(container, engine),
        snapshot=_snapshot(annotations),
        files=_one_of(annotations, names.FILES, get_args(Files)),
        same_host=_one_of(annotations, names.SAME_HOST, get_args(SameHost)),
        drain_s=_drain_s(annotations),
        required=_one_of(annotations, names.REQUIRED, get_args(Switch)) == "true",
    )


def _engines_container(
    containers: Sequence[ContainerShape], annotations: Mapping[str, str], engine: Engine | None
) -> ContainerShape:
    by_name = {container.name: container for container in containers}
    listed = ", ".join(by_name)
    if len(by_name) < len(containers):
        raise SettingsError(f"two of the containers {listed} have one name", hint="give each its own")
    if (name := annotations.get(names.CONTAINER)) is not None:
        if name in by_name:
            return by_name[name]
        raise SettingsError(
            f"there is no container {name}", hint=f"{names.CONTAINER} has to name one of {listed}"
        )
    if engine != "pytorch":
        for starting in (
            [each for each in containers if _served(each) is not None],
            [each for each in containers if _by_image(each) is not None],
        ):
            if len(starting) == 1:
                return starting[0]
            if starting:
                both = " and ".join(each.name for each in starting)
                raise SettingsError(
                    f"several containers start an engine ({both})",
                    hint=f"name one of them in the annotation {names.CONTAINER}",
                )
    if len(containers) == 1:
        return containers[0]
    if (default := by_name.get(annotations.get(DEFAULT_CONTAINER, ""))) is not None:
        return default
    shell = next(
        (f" ({each.name}: {_why_not(each)})" for each in containers if _starts_with_a_shell(each)), ""
    )
    raise SettingsError(
        f"none of the containers {listed} starts vLLM or SGLang by its command{shell}"
        if engine != "pytorch"
        else f"any of the containers {listed} could be meant",
        hint=f"name the engine's in the annotation {names.CONTAINER}, and, where its command is the image's "
        f"own, the engine in {names.ENGINE}",
    )


def _engine_of(container: ContainerShape, said: Engine | None) -> Engine:
    """Which engine the container starts, and that it can be given a load format. Raises SettingsError."""
    if said == "pytorch":
        return said
    found = _served(container)
    engine: EngineName | None = found.engine if found else said if said else _by_image(container)
    if said and engine != said:
        raise SettingsError(
            f"container {container.name} starts {engine}, and not {said}", hint=f"mend {names.ENGINE}"
        )
    if found is None and (engine is None or container.command or _starts_with_a_shell(container)):
        raise SettingsError(f"container {container.name}: {_why_not(container)}", hint=OWN_COMMAND)
    if engine is None or not _words(container):
        raise SettingsError(
            f"container {container.name} has neither command nor args, and an argument that is added would "
            "take the place of the image's own",
            hint="write the engine's arguments as args",
        )
    arguments = _words(container)[found.at if found else 0 :]
    if (chosen := load_format(arguments)) not in (None, LOAD_FORMAT):
        raise SettingsError(
            f"container {container.name} asks for --load-format {chosen}",
            hint="leave --load-format out; what nobody holds is loaded as without it",
        )
    return engine


def _words(container: ContainerShape) -> list[str]:
    return [*(container.command or ()), *(container.args or ())]


def _served(container: ContainerShape) -> Served | None:
    try:
        return served(_words(container))
    except SettingsError:
        return None


def _why_not(container: ContainerShape) -> str:
    if not _words(container):
        return "its command is the image's own, which is not known here"
    try:
        served(_words(container))
    except SettingsError as error:
        return str(error)
    return "it starts no engine"  # not reached: it is asked for what starts none


def _by_image(container: ContainerShape) -> EngineName | None:
    """The engine that an image's own entrypoint starts with `args`, as far as its name tells.

    ``vllm-openai`` (and ``vllm-openai-…``) is vLLM's own image, whose entrypoint is the server. SGLang's has
    none: an image that is named ``sglang`` counts only where its arguments begin with an option, as those of
    a server do, and not with a program.
    """
    if container.command or not container.args or _starts_with_a_shell(container):
        return None
    image = (container.image or "").partition("@")[0].rpartition("/")[2].partition(":")[0]
    if image == "vllm-openai" or image.startswith("vllm-openai-"):
        return "vllm"
    return "sglang" if image == "sglang" and container.args[0].startswith("-") else None


def _starts_with_a_shell(container: ContainerShape) -> bool:
    return any(PurePosixPath(word).name in SHELLS for word in _words(container)[:1])


def _model(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    where = names.MODEL_NAME if names.MODEL_NAME in annotations else names.MODEL
    name = annotations.get(names.MODEL_NAME, labels[names.MODEL])
    try:
        return TypeAdapter(ModelName).validate_python(name, strict=True)
    except ValidationError:
        raise SettingsError(
            f"{where} holds no name of a model",
            hint=f"name it in the label {names.MODEL}, or, where that cannot say it, in {names.MODEL_NAME}",
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
    if not 0 <= seconds <= MOST_DRAIN_S:
        raise SettingsError(
            f"{names.DRAIN_S} is {text}", hint=f"it has to be seconds, from 0 to {MOST_DRAIN_S:g}"
        )
    return seconds


Word = TypeVar("Word", bound=str)


def _one_of(annotations: Mapping[str, str], name: str, values: tuple[Word, ...]) -> Word | None:
    """The annotation's value, one of `values`; None where it is not set. Raises SettingsError for another."""
    if (said := annotations.get(name)) is None:
        return None
    for value in values:
        if value == said:
            return value
    raise SettingsError(f"{name} is {said}", hint=f"it has to be one of {', '.join(values)}")
