"""Which container of a Pod is the engine's, and what it starts. Runs in the webhook's process. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final, Literal

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.manifests import ContainerManifest
from rfork.engine_command import (
    LOAD_FORMAT,
    SHELLS,
    EngineCommand,
    EngineName,
    load_format,
    parse_engine_command,
)
from rfork.errors import SettingsError

Engine = Literal["vllm", "sglang", "pytorch"]

DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
"""Set by webhooks that add sidecars (Istio's): the container that was there before."""
IMAGE_ENTRYPOINT: Final = (
    "write the engine's own command (vllm serve …, sglang serve …, python3 -m sglang.launch_server …) as "
    f"command and args, or add --load-format rfork yourself and set {names.ENGINE}: pytorch"
)


def find_engine_container(
    containers: Sequence[ContainerManifest], annotations: Mapping[str, str], engine: Engine | None
) -> ContainerManifest:
    """The one that the annotation `names.CONTAINER` names, else what commands and images tell of themselves.

    `engine` is what the Pod says it runs, if it does. See `pods.wanted`. Raises SettingsError.
    """
    by_name = {container.name: container for container in containers}
    listed = ", ".join(by_name)
    if len(by_name) < len(containers):
        raise SettingsError(f"two of the containers {listed} have one name", hint="give each its own")
    if (name := annotations.get(names.CONTAINER)) is not None:
        if name in by_name:
            return by_name[name]
        raise SettingsError(f"there is no container {name}", hint=f"{names.CONTAINER} has to name one of {listed}")
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
        f"none of the containers {listed} starts vLLM or SGLang by its command{shell_containers}"
        if engine != "pytorch"
        else f"any of the containers {listed} could be meant",
        hint=f"name the engine's in the annotation {names.CONTAINER}, and, where its command is the image's "
        f"own, the engine in {names.ENGINE}",
    )


def engine_of(container: ContainerManifest, declared: Engine | None) -> Engine:
    """Which engine the container starts, and that it can be given a load format. Raises SettingsError."""
    if declared == "pytorch":
        return declared
    found = _served(container)
    engine: EngineName | None = found.engine if found else declared if declared else _by_image(container)
    if declared and engine != declared:
        raise SettingsError(
            f"container {container.name} starts {engine}, and not {declared}", hint=f"mend {names.ENGINE}"
        )
    if found is None and (engine is None or container.command or _starts_with_a_shell(container)):
        raise SettingsError(f"container {container.name}: {_unsupported_reason(container)}", hint=IMAGE_ENTRYPOINT)
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


def _words(container: ContainerManifest) -> list[str]:
    return [*(container.command or ()), *(container.args or ())]


def _served(container: ContainerManifest) -> EngineCommand | None:
    try:
        return parse_engine_command(_words(container))
    except SettingsError:
        return None


def _unsupported_reason(container: ContainerManifest) -> str:
    if not _words(container):
        return "its command is the image's own, which is not known here"
    try:
        parse_engine_command(_words(container))
    except SettingsError as error:
        return str(error)
    return "it starts no engine"  # not reached: it is asked for what starts none


def _by_image(container: ContainerManifest) -> EngineName | None:
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


def _starts_with_a_shell(container: ContainerManifest) -> bool:
    return any(PurePosixPath(word).name in SHELLS for word in _words(container)[:1])
