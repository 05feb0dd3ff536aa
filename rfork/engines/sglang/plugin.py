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
from rfork.engines.sglang import hook_targets

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

    incompatible = hook_targets.find_incompatible(hook_targets.EARLY)
    if incompatible:
        log.error("rfork is disabled: %s", hook_targets.format_incompatibility(incompatible))
        if not any(hook_target.path == hook_targets.ADD_CLI_ARGS for hook_target, _ in incompatible):
            HookRegistry.register(hook_targets.ADD_CLI_ARGS, _refuse_flags, HookType.AFTER)
        return
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices

    if LOAD_FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(hook_targets.ADD_CLI_ARGS, _add_flags, HookType.AFTER)
    HookRegistry.register(hook_targets.FROM_CLI_ARGS, _apply_flags, HookType.BEFORE)
    HookRegistry.register(hook_targets.VERIFY_LOAD_FORMAT, _make_loader, HookType.BEFORE)


def _add_flags(_: None, parser: argparse.ArgumentParser) -> None:
    from rfork.engines.sglang import flags

    flags.add(parser)


def _refuse_flags(_: None, parser: argparse.ArgumentParser) -> None:
    from rfork.engines.sglang import flags

    flags.add(
        parser,
        unavailable_reason=hook_targets.format_incompatibility(hook_targets.find_incompatible(hook_targets.EARLY)),
    )


def _apply_flags(_: type, arguments: argparse.Namespace) -> None:
    from rfork.engines.sglang import flags

    flags.apply_flags(arguments)


def _make_loader(config: LoadConfig) -> None:
    """Replace the load format by the loader class, which is how SGLang accepts custom loaders."""
    if config.load_format == LOAD_FORMAT:
        from rfork.engines.sglang.hooks import install
        from rfork.engines.sglang.loader import RforkLoader

        install()
        config.load_format = RforkLoader
