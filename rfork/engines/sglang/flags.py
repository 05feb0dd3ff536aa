"""`--rfork-*` flags of SGLang's launcher, passed on to its processes as RFORK_* variables."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from typing import Final, NoReturn
from uuid import uuid4

from rfork import settings as options
from rfork.engine_command import LOAD_FORMAT
from rfork.engines import flags as common
from rfork.engines.flags import variable as variable
from rfork.engines.sglang import hook_targets
from rfork.errors import SettingsError
from rfork.settings import InstanceSettings

log = logging.getLogger(__name__)

NOT_FLAGS: Final = common.NOT_FLAGS | {"replica"}
"""The launcher names the replica."""
UNSUPPORTED: Final = {
    "weight_cache_mode": "off",
    "cpu_offload_gb": 0,
    "offload_group_size": -1,
    "ple_offload_embedding": None,
    "dwdp_size": 1,
    "enable_eplb": False,
    "elastic_ep_backend": None,
    "enable_elastic_expert_backup": False,
    "enable_paged_experts": False,
    "kt_weight_path": None,
    "startup_weight_load_mode": "serial",
    "encoder_only": False,
    "use_ray": False,
}
"""Options that move weights or create processes in ways rfork does not support, with the value that disables
each.
"""
Value = str | int | float | bool | None


class _UnavailableFlag(argparse.Action):
    """Flag of an unavailable plug-in: using it ends the launch with the reason."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        _exit(f"{self.option_strings[0]}: {(self.help or '').replace('%%', '%')}")


def add(parser: argparse.ArgumentParser, *, unavailable_reason: str = "") -> None:
    """Add the flags as an argument group. With `unavailable_reason`, every flag ends the launch with that message."""
    group = parser.add_argument_group(
        "rfork", f"Load weights from running instances. Each flag implies --load-format {LOAD_FORMAT}."
    )
    if not unavailable_reason:
        common.add(group, lambda name: [f"--rfork-{name}"], NOT_FLAGS)
        return
    for name, _ in common.fields(NOT_FLAGS):
        help_text = unavailable_reason.replace("%", "%%")
        group.add_argument(_flag(name), nargs="?", action=_UnavailableFlag, dest=argparse.SUPPRESS, help=help_text)


def apply_flags(arguments: argparse.Namespace) -> None:
    """Export the flags to the server's processes, and validate all settings before any process starts.

    If something is wrong, the launch ends with exit code 2 and one line on stderr.
    """
    flags = common.to_environment(arguments, NOT_FLAGS)
    if flags and arguments.load_format not in ("auto", LOAD_FORMAT):
        _exit(f"--rfork-* requires --load-format {LOAD_FORMAT}, not {arguments.load_format}")
    if not flags and arguments.load_format != LOAD_FORMAT:
        if os.environ.get(variable("planner")):
            log.warning(
                "RFORK_PLANNER is set, but the load format is %s, so rfork is not used; set --load-format %s",
                arguments.load_format,
                LOAD_FORMAT,
            )
        return
    arguments.load_format = LOAD_FORMAT
    os.environ.update(flags)
    os.environ.setdefault(variable("replica"), f"sglang-{uuid4().hex[:12]}")
    try:
        settings = options.load(InstanceSettings)
        settings.tls  # noqa: B018  # its files are settings, too
    except SettingsError as error:
        _exit(_rename_to_flag(str(error), flags))
    if reason := unsupported_reason(vars(arguments)) or _ignored_load_format_reason(str(arguments.model_path)):
        _exit(reason)
    if incompatible := hook_targets.find_incompatible((*hook_targets.LAUNCHING, *hook_targets.SCHEDULING)):
        _exit(hook_targets.format_incompatibility(incompatible))
    if settings.planner is not None:
        from rfork.engines.sglang import drain_on_sigterm

        drain_on_sigterm.install(settings)


def unsupported_reason(arguments: Mapping[str, Value]) -> str | None:
    """Return why a server with these arguments cannot be forked, or None if it can."""
    for name, off in UNSUPPORTED.items():
        if (value := arguments.get(name, off)) != off and (value or off):
            return f"--{name.replace('_', '-')} cannot be used with --load-format {LOAD_FORMAT}"
    return None


def _ignored_load_format_reason(model: str) -> str | None:
    """Return why SGLang would ignore the load format for such a model, or None if it would not."""
    from sglang.srt.utils.common import is_remote_url
    from sglang.srt.utils.hf_transformers_utils import check_gguf_file
    from sglang.srt.utils.runai_utils import is_runai_obj_uri

    if is_runai_obj_uri(model) or is_remote_url(model):
        return f"--model-path: {model} is a storage URI: pass a folder or a model name, and the URI as --rfork-snapshot"
    if check_gguf_file(model):
        return f"--model-path: GGUF files have their own load format and cannot be forked ({model})"
    return None


def _flag(name: str) -> str:
    return f"--rfork-{name.replace('_', '-')}"


def _rename_to_flag(message: str, flags: Mapping[str, str]) -> str:
    """Return the message with the variable replaced by the flag that the user passed."""
    named, colon, rest = message.partition(":")
    for name, _ in common.fields(NOT_FLAGS):
        if variable(name) == named and named in flags:
            return f"{_flag(name)}{colon}{rest}"
    return message


def _exit(reason: str) -> NoReturn:
    sys.stderr.write(f"sglang: error: {reason}\n")
    raise SystemExit(2)
