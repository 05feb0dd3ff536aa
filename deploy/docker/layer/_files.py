"""Finds rfork's dependencies in a container that has rfork as files only (/opt/rfork).

`rfork` imports this first in each process of the engine. The image's packages have priority, so nothing is
replaced. If one of them is too old, rfork logs the reason once per loading process and the engine loads the
weights itself; with ``RFORK_FAIL_IF_NOT_FORKED`` that is an error. In this case no path stays added, because
engines detect installed packages and would use incompatible ones.

Only the standard library is imported at the top, with the syntax of Python 3.9, because the image's Python
may be a version without dependencies here.
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
"""The directory on PYTHONPATH; resolved, because `rfork launch` links to the package from elsewhere."""
DEPENDENCIES = PATH.parent / "deps"
ABI_TAG = "cp{}{}{}".format(*sys.version_info[:2], "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "")
"""This Python version, as wheels name it."""
LOAD_FORMAT = "rfork"
NEEDED = (
    "google.protobuf",
    "grpc",
    "httpx",
    "pydantic",
    "safetensors",
    "typing_extensions",
    "xxhash",
)
"""Modules that must be importable, whatever the metadata claims."""
TRIED = (
    "rfork.planner_client.client",
    "rfork.logs",
    "rfork.peer.v1.peer_pb2_grpc",
)
"""Modules of rfork that import those cheaply."""
NOT_OURS = frozenset({"numpy", "torch"})
"""Packages of the engine; any version is accepted."""


def _extend_path() -> None:
    folder = DEPENDENCIES / ABI_TAG
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def _leave_path() -> None:
    """Remove the path before the engine spawns processes, which would inherit it."""
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
    """Return why rfork cannot run in this image, in one line; empty if it can."""
    if not (DEPENDENCIES / ABI_TAG).is_dir():
        supported = ", ".join(sorted(each.name for each in DEPENDENCIES.glob("cp*"))) or "no Python"
        return f"rfork's files in {PATH.parent} are for {supported}, and this Python is {ABI_TAG}"
    try:
        wrong = list(dict.fromkeys(_version_problems()))
        unverified = [] if wrong else list(dict.fromkeys(_unverified_packages()))
    except Exception as error:  # metadata of other packages may be malformed; the engine must start
        return f"cannot inspect the packages of this image ({type(error).__name__}: {error})"
    if unverified:
        # Packages often require more than they need, so the imports decide.
        try:
            for module in TRIED:
                importlib.import_module(module)
        except Exception as error:  # any exception: packages report incompatibility in their own ways
            return f"{'; '.join(unverified)} ({type(error).__name__}: {error})"
    return "; ".join(wrong)


def _version_problems() -> Iterator[str]:
    """Return the problems with rfork's own dependencies."""
    ours = metadata.Distribution.at(next(PATH.glob("rfork-*.dist-info")))
    yield from _unmet_requirements(ours.requires or (), "rfork")
    for module in NEEDED:
        # A package of the image may hide the rest of its namespace, as an old `google` does.
        if importlib.util.find_spec(module) is None:
            yield f"this image hides the module {module}"


def _unverified_packages() -> Iterator[str]:
    """Return unmet requirements of the packages among rfork's files."""
    for added in metadata.distributions(path=[str(DEPENDENCIES / ABI_TAG)]):
        if metadata.distribution(added.metadata["Name"]).version == added.version:
            yield from _unmet_requirements(added.requires or (), added.metadata["Name"])


def _unmet_requirements(lines: Iterable[str], by: str) -> Iterator[str]:
    """Return the requirements that the first installed version does not meet."""
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
    """Make vLLM accept ``--load-format rfork`` and load with its own loader."""
    from vllm.config import replace
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class DefaultLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM has no types
        def __init__(self, load_config: Any) -> None:
            _log_status(logging.getLogger("vllm.rfork"))
            super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))

    register_model_loader(LOAD_FORMAT)(DefaultLoader)


def _disable_sglang_plugin() -> None:
    """Make SGLang accept ``--load-format rfork`` and known ``--rfork-*`` flags, and load with its own loader."""
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def auto(config: Any) -> None:
        if config.load_format == LOAD_FORMAT:
            _log_status(logging.getLogger(__name__))
            config.load_format = "auto"

    def flags(_: None, parser: Any) -> None:
        _extend_path()
        try:
            from rfork.engines.sglang.launcher import add
        except Exception:  # if anything is too old, there are no flags
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
    """Log why rfork is disabled. Raises RuntimeError if the server must not start without it."""
    # The settings module may be unusable, for example if pydantic is too old.
    if os.environ.get("RFORK_FAIL_IF_NOT_FORKED", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        raise RuntimeError(f"this server cannot be forked: {unusable_reason()} (unset RFORK_FAIL_IF_NOT_FORKED)")
    log.warning("rfork is disabled, falling back to the engine's loader: %s", unusable_reason())


_extend_path()
