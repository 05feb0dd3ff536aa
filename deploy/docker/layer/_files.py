"""Only in rfork as files (/opt/rfork of a container whose image lacks it): finds its dependencies.

`rfork` imports this first of all, in each process of the engine. What the image has goes before what is added
here, so nothing of it is replaced. Where something of it is too old for rfork, rfork says so, once in each
process that loads, and the engine loads its weights by itself; ``RFORK_FAIL_IF_NOT_FORKED`` makes that an error. Then
nothing stays added, either: engines look what there is, and would use a package that does not go with theirs.

Nothing but the standard library is imported at the top, and nothing newer than Python 3.9 is used: an image's
Python may be one that there are no dependencies for.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import sysconfig
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PATH = Path(__file__).resolve().parents[1]
"""What is on PYTHONPATH; resolved, as `rfork launch` links to the package from elsewhere."""
DEPENDENCIES = PATH.parent / "deps"
ABI_TAG = "cp{}{}{}".format(*sys.version_info[:2], "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "")
"""This Python, as wheels name it."""
LOAD_FORMAT = "rfork"
NEEDED = (
    "google.protobuf",
    "grpc",
    "grpc_health",
    "httpx",
    "jwt",
    "prometheus_client",
    "pydantic",
    "pydantic_settings",
    "safetensors",
    "structlog",
    "xxhash",
)
"""Modules that have to be found, whatever the metadata says."""
TRIED = (
    "rfork.planner_client.client",
    "rfork.logs",
    "rfork.peer.v1.peer_pb2_grpc",
    "grpc_health.v1.health_pb2_grpc",
)
"""Modules of rfork that import those, and nothing that costs much beside."""
NOT_OURS = frozenset({"torch"})
"""The engine's, whatever its version."""


def _extend_path() -> None:
    folder = DEPENDENCIES / ABI_TAG
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def _leave_path() -> None:
    """Processes that the engine spawns get the path as it is here: it is left before any is."""
    sys.path[:] = [each for each in sys.path if each != str(DEPENDENCIES / ABI_TAG)]


def vllm() -> None:
    """Entry point of ``vllm.general_plugins``."""
    if unusable_reason():
        _leave_path()
        _disable_vllm_plugin()
        return
    from rfork.engines.vllm.plugin import register

    register()


def sglang() -> None:
    """Entry point of ``sglang.srt.plugins``."""
    if unusable_reason():
        _leave_path()
        _disable_sglang_plugin()
        return
    from rfork.engines.sglang.plugin import register

    register()


@lru_cache(maxsize=1)
def unusable_reason() -> str:
    """Why rfork cannot run in this image, in one line; empty where it can."""
    if not (DEPENDENCIES / ABI_TAG).is_dir():
        supported = ", ".join(sorted(each.name for each in DEPENDENCIES.glob("cp*"))) or "no Python"
        return f"rfork's files in {PATH.parent} are for {supported}, and this Python is {ABI_TAG}"
    try:
        wrong = list(dict.fromkeys(_version_problems()))
        unverified = [] if wrong else list(dict.fromkeys(_unverified_packages()))
    except Exception as error:  # metadata of other packages may be anything; the engine has to start
        return f"the packages of this image cannot be looked at ({type(error).__name__}: {error})"
    if unverified:
        # What packages ask of one another is often more than they need: the imports tell.
        try:
            for module in TRIED:
                importlib.import_module(module)
        except Exception as error:  # of whatever kind: it is a package's own way to say that it does not fit
            return f"{'; '.join(unverified)} ({type(error).__name__}: {error})"
    return "; ".join(wrong)


def _version_problems() -> Iterator[str]:
    """What of rfork's own dependencies is not as it must be."""
    ours = metadata.Distribution.at(next(PATH.glob("rfork-*.dist-info")))
    yield from _unmet_requirements(ours.requires or (), "rfork")
    for module in NEEDED:
        # A package of the image may hide the rest of its name space, as an old `google` does.
        if importlib.util.find_spec(module) is None:
            yield f"this image hides the module {module}"


def _unverified_packages() -> Iterator[str]:
    """What those among rfork's files ask for, and the image has otherwise."""
    for added in metadata.distributions(path=[str(DEPENDENCIES / ABI_TAG)]):
        if metadata.distribution(added.metadata["Name"]).version == added.version:
            yield from _unmet_requirements(added.requires or (), added.metadata["Name"])


def _unmet_requirements(lines: Iterable[str], by: str) -> Iterator[str]:
    """Requirements that what Python finds first does not meet."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, lines):
        if requirement.name in NOT_OURS or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing, which {by} needs"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"this image's {requirement.name} is {version}, and {by} needs {requirement.specifier}"


def _disable_vllm_plugin() -> None:
    """Have vLLM take ``--load-format rfork`` for its own."""
    from vllm.config import replace
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class ByItself(DefaultModelLoader):  # type: ignore[misc]  # vLLM has no types
        def __init__(self, load_config: Any) -> None:
            _log_status(logging.getLogger("vllm.rfork"))
            super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))

    register_model_loader(LOAD_FORMAT)(ByItself)


def _disable_sglang_plugin() -> None:
    """Have SGLang take ``--load-format rfork`` for its own; and ``--rfork-*``, as far as they are known."""
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def auto(config: Any) -> None:
        if config.load_format == LOAD_FORMAT:
            _log_status(logging.getLogger(__name__))
            config.load_format = "auto"

    def flags(_: None, parser: Any) -> None:
        _extend_path()
        try:
            from rfork.engines.sglang.flags import add
        except Exception:  # whatever is too old: then there are no flags
            return
        finally:
            _leave_path()
        add(parser)

    if LOAD_FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", flags, HookType.AFTER)
    verify = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    HookRegistry.register(verify, auto, HookType.BEFORE)


@lru_cache(maxsize=1)
def _log_status(log: logging.Logger) -> None:
    """Say why rfork is off. Raises RuntimeError where the server must not start without it."""
    # The settings themselves may not be there: pydantic may be what is too old.
    if os.environ.get("RFORK_FAIL_IF_NOT_FORKED", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        raise RuntimeError(f"this server cannot be forked: {unusable_reason()} (unset RFORK_FAIL_IF_NOT_FORKED)")
    log.warning("rfork is off, the engine loads its weights by itself: %s", unusable_reason())


_extend_path()
