"""Runs an engine's command so that the server forks its weights, and drains it before a SIGTERM reaches it.

Runs in rfork's own process (`rfork launch`), also as process 1 of a container. No file of the engine is
modified. Only the engine itself is waited for; its orphaned children are not reaped.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Final
from uuid import uuid4

import rfork
from rfork.engine_command import (
    ALLOWLISTS,
    ENTRY_POINTS,
    LOAD_FORMAT,
    PLUGIN,
    EngineName,
    load_format,
    parse_engine_command,
    plugin_allowlist,
)
from rfork.engines.flags import variable
from rfork.errors import RforkError, SettingsError
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.drain import drain_replica
from rfork.settings import InstanceSettings
from rfork.shutdown import get_interruptible

log = logger(__name__)

FORWARDED: Final = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals forwarded unchanged. SIGTERM is forwarded after the drain."""

Drain = Callable[[threading.Event], None]
"""Returns when the engine may exit or the event is set. Runs on its own thread and must not raise."""


class _Exited(int):
    """Exit code of the engine."""


class _DrainDone:
    """The drain has finished: the engine may exit."""


_Event = signal.Signals | _Exited | _DrainDone


def supervise(command: Sequence[str], environment: Mapping[str, str], drain: Drain) -> int:
    """Run the command until it exits. Returns its exit code, or 128 + n if signal n ended it.

    The first SIGTERM starts `drain` and is forwarded after it; the second is forwarded immediately. Must be
    called on the main thread. Raises SettingsError if the command cannot be started.
    """
    events: SimpleQueue[_Event] = SimpleQueue()

    def on_signal(number: int, _: FrameType | None) -> None:
        events.put(signal.Signals(number))

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, *FORWARDED)}
    stop = threading.Event()

    def drain_and_stop() -> None:
        drain(stop)
        events.put(_DrainDone())

    try:
        # In its own session, so that a terminal's Ctrl-C reaches only this process, which forwards it once.
        engine = subprocess.Popen(command, env=dict(environment), start_new_session=True)
        threading.Thread(target=lambda: events.put(_Exited(engine.wait())), name="rfork-engine", daemon=True).start()
        terminated = 0
        while True:
            event = get_interruptible(events)
            if isinstance(event, _Exited):
                return int(event) if event >= 0 else 128 - event
            if isinstance(event, _DrainDone):
                # A server that gets another SIGTERM during its shutdown may exit immediately.
                if not stop.is_set():
                    engine.send_signal(signal.SIGTERM)
            elif event is not signal.SIGTERM:
                engine.send_signal(event)
            elif terminated == 0:
                terminated = 1
                threading.Thread(target=drain_and_stop, name="rfork-drain", daemon=True).start()
            else:
                stop.set()
                engine.send_signal(signal.SIGTERM)
    except OSError as error:
        hint = "install the engine in this environment, or pass the program's path"
        raise SettingsError(f"cannot start {command[0]}: {error.strerror}", hint=hint) from None
    finally:
        stop.set()
        for number, handler in before.items():
            signal.signal(number, handler)


FILES_MODULE: Final = "_files"
"""Module that exists only in a copied rfork (see deploy/docker/files.py); its functions are entry points."""
ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Launch:
    """The rewritten command and its environment."""

    engine: EngineName
    command: tuple[str, ...]
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    """The engine's arguments: those of the command after its program and verb."""


def rewrite_command(command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return the command with ``--load-format rfork`` and an environment that allows the plug-in.

    `environment` is the environment the command would run in. Raises SettingsError if the command starts no
    known engine, cannot be parsed, or requests another load format.
    """
    words, variables = _strip_env_prefix(command, environment)
    if not words:
        raise SettingsError(
            "no command to launch",
            hint="rfork launch --planner URL -- vllm serve MODEL, or … -- python -m sglang.launch_server …",
        )
    found = parse_engine_command(words)
    chosen = load_format(words[found.at :])
    if chosen is not None and chosen != LOAD_FORMAT:
        raise SettingsError(
            f"the command sets --load-format {chosen}, but `rfork launch` requires {LOAD_FORMAT}",
            hint="remove --load-format; a model without a source is loaded by the engine's own loader",
        )
    if chosen is None:
        words = [*words, "--load-format", LOAD_FORMAT]
    allowlist = ALLOWLISTS[found.engine]
    if (names := plugin_allowlist(found.engine, variables.get(allowlist))) is not None:
        variables[allowlist] = names
    variables.setdefault(variable("replica"), replica_name())
    return Launch(found.engine, tuple(words), variables, tuple(words[found.at :]))


def engine_environment(environment: Mapping[str, str], settings: InstanceSettings) -> dict[str, str]:
    """Return the environment of a server that its launcher drains: the server itself does not wait for readers again.

    `settings` are the settings of `environment`. Without a planner the launcher drains nothing.
    """
    overrides = {} if settings.planner is None else {variable("drain_timeout_s"): "0"}
    return {**environment, **overrides}


def replica_name() -> str:
    """Return a unique replica name for one start of one server."""
    host = re.sub(r"[^A-Za-z0-9_.-]+", "-", socket.gethostname())[-40:].strip("-")
    return f"{host or 'server'}-{uuid4().hex[:12]}"


@contextmanager
def with_plugin_path(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield an environment in which any Python process finds rfork and its plug-ins.

    Engines find plug-ins through the metadata of installed packages. An image that rfork's files were only
    copied into has no such metadata, so a temporary folder with the metadata and a link to this rfork is
    prepended to PYTHONPATH. If rfork is installed as well, Python uses the first copy and treats both as one
    package. A copied rfork has its own entry points, which handle images that are too old for it.
    """
    with tempfile.TemporaryDirectory(prefix="rfork-launch-") as temporary:
        folder = Path(temporary)
        (folder / "rfork").symlink_to(Path(rfork.__file__).parent, target_is_directory=True)
        metadata = folder / f"rfork-{rfork.__version__}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rfork\nVersion: {rfork.__version__}\n")
        (metadata / "entry_points.txt").write_text(
            "".join(f"[{group}]\n{PLUGIN} = {where}\n" for group, where in _entry_points().items())
        )
        before = environment.get("PYTHONPATH")
        yield {**environment, "PYTHONPATH": f"{folder}:{before}" if before else str(folder)}


def _entry_points() -> Mapping[str, str]:
    """Return the entry points of this rfork by group, as its metadata would list them."""
    if not Path(rfork.__file__).with_name(f"{FILES_MODULE}.py").is_file():
        return ENTRY_POINTS
    return {group: f"rfork.{FILES_MODULE}:{group.partition('.')[0]}" for group in ENTRY_POINTS}


def _strip_env_prefix(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command without its ``env X=Y`` prefix, and the environment including those variables."""
    words, variables = list(command), dict(environment)
    while words and Path(words[0]).name == "env":
        words = words[1:]
        while words and ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words and words[0].startswith("-"):
            raise SettingsError(
                f"cannot parse `env {words[0]}`",
                hint="set the variables in front of `rfork launch`, or as `env NAME=VALUE …` without options",
            )
    return words, variables


def drain_server(settings: InstanceSettings, *, remove: bool = False, stop: threading.Event | None = None) -> None:
    """Drain all seeds of a server and wait until they have no readers, or `stop` is set. Failures are logged.

    `remove`: the seeds are killed afterwards, before they could unregister, so they are unregistered here.
    """
    if settings.planner is None or settings.replica is None:
        return
    log.info("draining before the server exits", replica=settings.replica, timeout_s=settings.drain_timeout_s)
    try:
        with PlannerClient.of(settings) as planner:
            drained = drain_replica(planner, settings.replica, wait_s=settings.drain_timeout_s, force=True, stop=stop)
            for each in drained:
                log.info("drained", instance_id=each.instance_id, can_exit=each.can_exit, reason=each.reason)
                if remove:
                    planner.remove(each.instance_id)
    except RforkError as error:
        log.warning("failed to drain the seeds", reason=str(error), hint=error.hint)
    except Exception:  # a bug must not stop the engine from exiting
        log.exception("failed to drain the seeds")
    else:
        log.info("seeds drained", seeds=len(drained), in_use=sum(not each.can_exit for each in drained))
