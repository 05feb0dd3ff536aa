"""Entry point ``rfork`` of SGLang's group ``sglang.srt.plugins``, called in each of its processes.

In the launcher it runs before the command line is parsed, in a scheduler before that process is set up. Both
must cost nothing if rfork is not used, so only the flags and the load format are added here. The other hooks
are installed once the load format is ``rfork``: in the launcher by `flags`, in a scheduler by `loader`.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from rfork.engine_command import LOAD_FORMAT
from rfork.engines.sglang import compat

if TYPE_CHECKING:
    import argparse

    from sglang.srt.configs.load_config import LoadConfig

log = logging.getLogger(__name__)


@cache
def register() -> None:
    """Add the flags and the load format to SGLang in this process. Idempotent.

    SGLang only logs what a plug-in raises, and continues without it. So if hook targets are incompatible, the
    error is logged, and using any rfork flag ends the launch with that error.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    incompatible = compat.find_incompatible(compat.EARLY)
    if incompatible:
        log.error("rfork is disabled: %s", compat.format_incompatibility(incompatible))
        if not any(hook_target.path == compat.ADD_CLI_ARGS for hook_target, _ in incompatible):
            HookRegistry.register(compat.ADD_CLI_ARGS, _refuse_flags, HookType.AFTER)
        return
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices

    if LOAD_FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(compat.ADD_CLI_ARGS, _add_flags, HookType.AFTER)
    HookRegistry.register(compat.FROM_CLI_ARGS, _apply_flags, HookType.BEFORE)
    HookRegistry.register(compat.VERIFY_LOAD_FORMAT, _make_loader, HookType.BEFORE)


def _add_flags(_: None, parser: argparse.ArgumentParser) -> None:
    from rfork.engines.sglang import launcher

    launcher.add(parser)


def _refuse_flags(_: None, parser: argparse.ArgumentParser) -> None:
    from rfork.engines.sglang import launcher

    launcher.add(
        parser,
        unavailable_reason=compat.format_incompatibility(compat.find_incompatible(compat.EARLY)),
    )


def _apply_flags(_: type, arguments: argparse.Namespace) -> None:
    from rfork.engines.sglang import launcher

    launcher.apply_flags(arguments)


def _make_loader(config: LoadConfig) -> None:
    """Replace the load format by the loader class, which is how SGLang accepts custom loaders."""
    if config.load_format == LOAD_FORMAT:
        from rfork.engines.sglang.hooks import install
        from rfork.engines.sglang.loader import RforkLoader

        install()
        config.load_format = RforkLoader
