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
from functools import cache
from typing import TYPE_CHECKING, Final, NoReturn
from uuid import uuid4

from rfork import settings as options
from rfork.engine_command import LOAD_FORMAT
from rfork.engines import flags as common
from rfork.engines.flags import variable as variable
from rfork.engines.hook_targets import Compatibility, call_after, call_before
from rfork.engines.sglang import compat, weight_cache
from rfork.errors import SettingsError
from rfork.settings import InstanceSettings

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import SignalHandler, TokenizerManager


log = logging.getLogger(__name__)

NOT_FLAGS: Final = common.NOT_FLAGS | {"replica"}
"""The launcher names the replica."""
OWN_LOAD_FORMAT: Final = "auto"
"""SGLang's own load format, with which it detects the format of the files."""

DAEMON_MODE: Final = "daemon"
"""SGLang's weight cache mode with which a server starts daemons that load its weights."""


class _IgnoredFlag(argparse.Action):
    """Flag of a plug-in that this SGLang does not support; its help text is the reason."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        _use_own_loader(
            (self.help or "").replace("%%", "%"), required=_flag("fail_if_not_forked") in self.option_strings
        )


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags as an argument group."""
    common.add(_group(parser), lambda name: [f"--rfork-{name}"], NOT_FLAGS)


def add_ignored(parser: argparse.ArgumentParser, reason: str) -> None:
    """Add flags, and the load format, with which SGLang uses its own loader and logs the reason.

    If a fork is required, they end the launch with it.
    """
    group = _group(parser)
    for name, _ in common.fields(NOT_FLAGS):
        group.add_argument(
            _flag(name), nargs="?", action=_IgnoredFlag, dest=argparse.SUPPRESS, help=reason.replace("%", "%%")
        )

    def own_format(value: str) -> str:
        if value == LOAD_FORMAT:
            _use_own_loader(reason)
        return OWN_LOAD_FORMAT if value == LOAD_FORMAT else value

    if (load_format := parser._option_string_actions.get("--load-format")) is not None:
        load_format.type = own_format


def _group(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    return parser.add_argument_group(
        "rfork", f"Load weights from running instances. Each flag implies --load-format {LOAD_FORMAT}."
    )


def _use_own_loader(reason: str, *, required: bool = False) -> None:
    """Log that SGLang's own loader is used. Ends the launch if a fork is `required`, here or by the settings."""
    try:
        required_reason = options.load(InstanceSettings).fork_required_reason
    except SettingsError as error:
        _exit(str(error))
    if required:
        required_reason = "RFORK_FAIL_IF_NOT_FORKED is set"
    if required_reason is not None:
        _exit(f"{reason} ({required_reason})")
    _log_own_loader(reason)


@cache
def _log_own_loader(reason: str) -> None:
    log.error("falling back to SGLang's own loader: %s", reason)


def apply_flags(arguments: argparse.Namespace) -> None:
    """Export the flags to the server's processes, and validate all settings before any process starts.

    If something is wrong, the launch ends with exit code 2 and one line on stderr. With an SGLang that cannot be
    forked, it uses SGLang's own loader, unless a fork is required.
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
    starts_daemons = getattr(arguments, "weight_cache_mode", None) == DAEMON_MODE
    mode = {"weight_cache_mode": compat.UNSUPPORTED["weight_cache_mode"]} if starts_daemons else {}
    if reason := compat.unsupported_reason({**vars(arguments), **mode}):
        _exit(reason)
    compatibility = Compatibility.of((*compat.LAUNCHING, *compat.scheduling()))
    if compatibility.core:
        arguments.load_format = OWN_LOAD_FORMAT
        _use_own_loader(compat.format_incompatibility(compatibility.core))
        return
    if reason := _ignored_load_format_reason(str(arguments.model_path)):
        _exit(reason)
    if compatibility.comfort:
        log.warning("rfork runs without some features: %s", compat.format_incompatibility(compatibility.comfort))
    if settings.planner is not None:
        install_drain(settings)
    if starts_daemons:
        weight_cache.hook_launchers()


def _ignored_load_format_reason(model: str) -> str | None:
    """Return why SGLang would ignore the load format for such a model, or None if it would not."""
    try:
        from sglang.srt.utils.common import is_remote_url
        from sglang.srt.utils.hf_transformers_utils import check_gguf_file
        from sglang.srt.utils.runai_utils import is_runai_obj_uri
    except ImportError:  # SGLang reports such a model itself
        return None
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
