"""What SGLang calls: entry point ``rfork`` of its group ``sglang.srt.plugins``, in each of its processes.

In the launcher it runs before the command line is parsed; in a scheduler, before that is made. Both are to
cost nothing where rfork is not used: only the flags and the load format are added here. What else is hooked
is hooked once the load format is ``rfork``: in the launcher by `flags`, in a scheduler by `loader`.
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
    """Add the flags and the load format to this process's SGLang. Again is harmless.

    SGLang only logs what a plug-in raises, and would go on without it. So where the points that are hooked
    are not as they were, that is logged as an error, and the flags end the launch, saying so.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    moved = hook_targets.find_incompatible(hook_targets.EARLY)
    if moved:
        log.error("rfork is off: %s", hook_targets.format_incompatibility(moved))
        if not any(point.path == hook_targets.ADD_CLI_ARGS for point, _ in moved):
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
        why_not=hook_targets.format_incompatibility(hook_targets.find_incompatible(hook_targets.EARLY)),
    )


def _apply_flags(_: type, arguments: argparse.Namespace) -> None:
    from rfork.engines.sglang import flags

    flags.apply_flags(arguments)


def _make_loader(config: LoadConfig) -> None:
    """A class in the place of a format is SGLang's own way to be told of a loader."""
    if config.load_format == LOAD_FORMAT:
        from rfork.engines.sglang.hooks import install
        from rfork.engines.sglang.loader import RforkLoader

        install()
        config.load_format = RforkLoader
