"""Finds the engine's container in a Pod, and the engine that it starts. Runs in the webhook's process. Pure."""

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
"""Set by webhooks that add sidecars (such as Istio's): the original container."""
IMAGE_ENTRYPOINT: Final = (
    "write the engine's command (vllm serve …, sglang serve …, python3 -m sglang.launch_server …) as "
    f"command and args, or add --load-format rfork yourself and set {names.ENGINE}: pytorch"
)


def find_engine_container(
    containers: Sequence[ContainerManifest], annotations: Mapping[str, str], engine: Engine | None
) -> ContainerManifest:
    """Return the container named by the annotation `names.CONTAINER`, else find it by commands and images.

    `engine` is the engine that the Pod states, if any. See `pod_request.parse_request`. Raises SettingsError.
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
