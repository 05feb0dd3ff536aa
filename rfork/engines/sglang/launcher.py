"""SGLang's launcher process: `--rfork-*` flags, passed on to its processes as RFORK_* variables, and the drain
on SIGTERM.

On SIGTERM, SGLang first finishes its running requests, then stops its schedulers. In that time the instances
accept no new readers, and current readers may finish before the schedulers exit.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NoReturn
from uuid import uuid4

from rfork import settings as options
from rfork.engine_command import LOAD_FORMAT
from rfork.engines import flags as common
from rfork.engines.flags import variable as variable
from rfork.engines.hook_targets import call_after, call_before
from rfork.engines.sglang import compat
from rfork.errors import SettingsError
from rfork.settings import InstanceSettings

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import SignalHandler, TokenizerManager


log = logging.getLogger(__name__)

NOT_FLAGS: Final = common.NOT_FLAGS | {"replica"}
"""The launcher names the replica."""


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
    if reason := compat.unsupported_reason(vars(arguments)) or _ignored_load_format_reason(str(arguments.model_path)):
        _exit(reason)
    if incompatible := compat.find_incompatible((*compat.LAUNCHING, *compat.SCHEDULING)):
        _exit(compat.format_incompatibility(incompatible))
    if settings.planner is not None:
        install_drain(settings)


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


def install_drain(settings: InstanceSettings) -> None:
    """Drain the server's seeds on SIGTERM."""
    drain = SigtermDrain(settings)
    compat.hook(compat.ON_SIGTERM, call_after(drain.on_sigterm))
    compat.hook(compat.DISPATCH, call_before(drain.before_dispatch))


class SigtermDrain:
    """Drains the instances of one server through the planner, once and for a limited time."""

    def __init__(self, settings: InstanceSettings) -> None:
        # Imported only in servers that use rfork.
        from rfork.engines.launch import drain_server
        from rfork.planner_client.ownership import owner_secret

        self._settings = settings
        self._drain_server = drain_server
        owner_secret(settings)  # read now: the file may be removed before the server exits
        self._drained = threading.Event()
        self._until: float | None = None

    def on_sigterm(self, _: None, handler: SignalHandler, *args: object, **kwargs: object) -> None:
        """Start draining on a thread. Called on the server's event loop, so it must not block."""
        if self._until is None:
            self._until = time.monotonic() + self._settings.drain_timeout_s
            threading.Thread(target=self._drain, name="rfork-drain", daemon=True).start()

    def before_dispatch(self, manager: TokenizerManager, obj: object) -> None:
        """Wait for the drain before the schedulers are stopped. All requests have finished by then."""
        from sglang.srt.managers.io_struct import ShutdownReq

        if isinstance(obj, ShutdownReq) and self._until is not None:
            self._drained.wait(max(self._until - time.monotonic(), 0.0))

    def _drain(self) -> None:
        try:
            self._drain_server(self._settings)
        finally:
            self._drained.set()
