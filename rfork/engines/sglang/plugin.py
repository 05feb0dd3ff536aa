"""Entry point ``rfork`` of SGLang's group ``sglang.srt.plugins``, called in each of its processes.

In the launcher it runs before the command line is parsed, in a scheduler before that process is set up. Both
must cost nothing if rfork is not used, so only the flags and the load format are added here. The other hooks
are installed once the load format is ``rfork``: in the launcher by `flags`, in a scheduler by `loader`. Such a
scheduler imports the modules of a fork on another thread while SGLang sets it up.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from rfork.engine_command import LOAD_FORMAT
from rfork.engines.hook_targets import call_before
from rfork.engines.sglang import compat

if TYPE_CHECKING:
    import argparse

    from sglang.srt.configs.load_config import LoadConfig

    from rfork.engines.early_imports import EarlyImports

log = logging.getLogger(__name__)


@cache
def register() -> None:
    """Add the flags and the load format to SGLang in this process. Idempotent.

    If hook targets are missing, the error is logged, and flags of rfork only log that SGLang's own loader is used.
    """
    incompatible = compat.incompatible_early()
    if incompatible:
        log.error("rfork is disabled: %s", compat.format_incompatibility(incompatible))
        if any(hook_target.path in (compat.REGISTER, compat.ADD_CLI_ARGS) for hook_target, _ in incompatible):
            return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if incompatible:
        HookRegistry.register(compat.ADD_CLI_ARGS, _ignore_flags, HookType.AFTER)
        return
    if LOAD_FORMAT not in compat.load_formats():
        compat.load_formats().append(LOAD_FORMAT)
    HookRegistry.register(compat.ADD_CLI_ARGS, _add_flags, HookType.AFTER)
    HookRegistry.register(compat.FROM_CLI_ARGS, _apply_flags, HookType.BEFORE)
    HookRegistry.register(compat.VERIFY_LOAD_FORMAT, _make_loader, HookType.BEFORE)
    if compat.SCHEDULER.rpartition(".")[0] in sys.modules:  # otherwise this process has no scheduler
        compat.hook(f"{compat.SCHEDULER}.__init__", call_before(_import_early))


def _import_early(_: object, server_args: Any = None, *args: object, **kwargs: object) -> None:
    """Start to import the modules of a fork, if the scheduler with these arguments will load its model with rfork."""
    if getattr(server_args, "load_format", None) == LOAD_FORMAT:
        _early_imports().start()


@cache
def _early_imports() -> EarlyImports:
    from rfork.engines.early_imports import EarlyImports

    return EarlyImports()


def _add_flags(_: object, parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
    from rfork.engines.sglang import launcher

    launcher.add(parser)


def _ignore_flags(_: object, parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
    from rfork.engines.sglang import launcher

    launcher.add_ignored(parser, compat.format_incompatibility(compat.incompatible_early()))


def _apply_flags(_: object, arguments: argparse.Namespace, *args: object, **kwargs: object) -> None:
    from rfork.engines.sglang import launcher

    launcher.apply_flags(arguments)


def _make_loader(config: LoadConfig, *args: object, **kwargs: object) -> None:
    """Replace the load format by the loader class, which is how SGLang accepts custom loaders.

    If this SGLang cannot be forked, it is replaced by SGLang's own. Raises EngineMismatch if a fork is
    required.
    """
    if config.load_format != LOAD_FORMAT:
        return
    _early_imports().wait()
    from rfork.engines.sglang.hooks import install

    if core := install().core:
        _require_no_fork(compat.format_incompatibility(core))
        config.load_format = "auto"
        return
    from rfork.engines.sglang.loader import RforkLoader, choose_loader

    compat.hook(compat.CHOOSE_LOADER, choose_loader)
    config.load_format = RforkLoader


def _require_no_fork(reason: str) -> None:
    """Log why SGLang's own loader is used. Raises EngineMismatch if it must not be."""
    from rfork import settings as options
    from rfork.errors import EngineMismatch
    from rfork.settings import InstanceSettings

    if options.load(InstanceSettings).fork_required_reason is not None:
        raise EngineMismatch(reason, hint="install a tested version of SGLang")
    log.error("falling back to SGLang's own loader: %s", reason)
