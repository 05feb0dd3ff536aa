"""`--rfork-*` of SGLang's launcher, made of `rfork.settings.InstanceSettings`: its processes get them as RFORK_*."""

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
"""Replicas are named here."""
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
"""What moves weights about, or makes processes, in ways rfork does not follow; and what it is when off."""
Value = str | int | float | bool | None


class _UnavailableFlag(argparse.Action):
    """A flag that cannot be used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        _exit(f"{self.option_strings[0]}: {(self.help or '').replace('%%', '%')}")


def add(parser: argparse.ArgumentParser, *, why_not: str = "") -> None:
    """Add the flags as a group of their own. With `why_not`, each ends the launch and says so."""
    group = parser.add_argument_group(
        "rfork", f"Weights from instances that run already; each flag implies --load-format {LOAD_FORMAT}."
    )
    if not why_not:
        common.add(group, lambda name: [f"--rfork-{name}"], NOT_FLAGS)
        return
    for name, _ in common.fields(NOT_FLAGS):
        help_text = why_not.replace("%", "%%")
        group.add_argument(_flag(name), nargs="?", action=_UnavailableFlag, dest=argparse.SUPPRESS, help=help_text)


def apply_flags(arguments: argparse.Namespace) -> None:
    """Put what was given where the server's processes look, and check all of it, before any of them starts.

    Ends the launch with exit code 2 and one line where something is wrong.
    """
    flags = common.to_environment(arguments, NOT_FLAGS)
    if flags and arguments.load_format not in ("auto", LOAD_FORMAT):
        _exit(f"--rfork-* goes with --load-format {LOAD_FORMAT}, not with {arguments.load_format}")
    if not flags and arguments.load_format != LOAD_FORMAT:
        if os.environ.get(variable("planner")):
            log.warning(
                "RFORK_PLANNER is set, but the load format is %s: rfork does nothing; give --load-format %s",
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
    if why := unsupported_reason(vars(arguments)) or _non_rfork_loader(str(arguments.model_path)):
        _exit(why)
    if moved := hook_targets.find_incompatible((*hook_targets.LAUNCHING, *hook_targets.SCHEDULING)):
        _exit(hook_targets.format_incompatibility(moved))
    if settings.planner is not None:
        from rfork.engines.sglang import drain_on_sigterm

        drain_on_sigterm.install(settings)


def unsupported_reason(arguments: Mapping[str, Value]) -> str | None:
    """Why a server that is told this cannot be forked; None where it can."""
    for name, off in UNSUPPORTED.items():
        if (value := arguments.get(name, off)) != off and (value or off):
            return f"--{name.replace('_', '-')} does not go with --load-format {LOAD_FORMAT}"
    return None


def _non_rfork_loader(model: str) -> str | None:
    """Why SGLang would not ask the load format that it is given for such a model."""
    from sglang.srt.utils.common import is_remote_url
    from sglang.srt.utils.hf_transformers_utils import check_gguf_file
    from sglang.srt.utils.runai_utils import is_runai_obj_uri

    if is_runai_obj_uri(model) or is_remote_url(model):
        return f"--model-path: {model} is storage: give a folder or a name, and storage as --rfork-snapshot"
    if check_gguf_file(model):
        return f"--model-path: GGUF files have a load format of their own, and are not forked ({model})"
    return None


def _flag(name: str) -> str:
    return f"--rfork-{name.replace('_', '-')}"


def _rename_to_flag(message: str, flags: Mapping[str, str]) -> str:
    """The message, under the name that the user gave the option by."""
    named, colon, rest = message.partition(":")
    for name, _ in common.fields(NOT_FLAGS):
        if variable(name) == named and named in flags:
            return f"{_flag(name)}{colon}{rest}"
    return message


def _exit(why: str) -> NoReturn:
    sys.stderr.write(f"sglang: error: {why}\n")
    raise SystemExit(2)
