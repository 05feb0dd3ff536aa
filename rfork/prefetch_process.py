"""Processes that fetch something for an engine that is about to start, with less CPU priority than the engine.

One is `rfork cache pull`: it copies JIT caches into the engine's cache directories. Entries appear there complete, so
they may also arrive after the engine has begun to compile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Final

from pydantic import BaseModel, ValidationError

from rfork.logs import logger
from rfork.settings import ArtifactSettings, InstanceSettings, variables_of

log = logger(__name__)

CACHE_TYPES_VARIABLE: Final = variables_of(ArtifactSettings, "kinds")[0]
LOG_LEVEL_VARIABLE: Final = variables_of(InstanceSettings, "log_level")[0]
OWN_VARIABLES: Final = frozenset(
    name for field in ("replica", "peer_port", "http_port") for name in variables_of(InstanceSettings, field)
)
"""Settings of one process: those that it starts must not have them."""
NICE: Final = 10
"""CPU priority of processes that prefetch, as for nice(1)."""
STOP_S: Final = 10.0
"""Maximum time for a process to end after SIGTERM."""

StartProcess = Callable[[Sequence[str], Mapping[str, str], "int | IO[bytes]"], "subprocess.Popen[bytes]"]
"""Starts a command with an environment and a standard output, which is an argument of Popen."""


class PullResult(BaseModel):
    """The fields of `rfork cache pull --json` that are logged: see `rfork.artifacts.ArtifactReport`."""

    files: int
    bytes: int
    already_present: int
    seconds: float
    source: str | None
    reason: str | None


def start_process(
    command: Sequence[str], environment: Mapping[str, str], stdout: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a command in its own session, as an engine is, and with less CPU priority: the engine's start decides."""
    process = subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=stdout, start_new_session=True
    )
    with suppress(OSError):  # it may have ended
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
    return process


def environment_of_others(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the settings of the process that it belongs to."""
    return {name: value for name, value in environment.items() if name not in OWN_VARIABLES}


def wait_for(process: subprocess.Popen[bytes], stopped: threading.Event) -> int | None:
    """Return the exit code of a process, or None if it was terminated because `stopped` was set."""
    while process.poll() is None:
        if stopped.wait(1.0):
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return None
    return process.returncode


def pull_caches(
    model: str, environment: Mapping[str, str], stopped: threading.Event, start: StartProcess = start_process
) -> None:
    """Copy the JIT caches that instances of a model have compiled, and log the result. Nothing is raised."""
    command = [sys.executable, "-m", "rfork", "cache", "pull", "--json", "--model", model]
    # The command's own messages describe one fork in detail; the result is logged here.
    own = {**environment_of_others(environment), LOG_LEVEL_VARIABLE: "warning"}
    try:
        with tempfile.TemporaryFile() as output:
            exit_code = wait_for(start(command, own, output), stopped)
            output.seek(0)
            text = output.read()
        if exit_code is None:
            return
        if exit_code:
            _log_nothing(model, f"rfork cache pull ended with exit code {exit_code}")
            return
        result = PullResult.model_validate_json(text)
        if result.source is None:
            _log_nothing(model, result.reason)
        else:
            log.info("JIT caches prefetched", model=model, **result.model_dump(exclude_none=True))
    except (OSError, ValidationError) as error:
        _log_nothing(model, str(error))
    except Exception:  # a bug must not end an engine or a holder
        log.exception("JIT caches not prefetched", model=model)


def _log_nothing(model: str, reason: str | None) -> None:
    log.info("JIT caches not prefetched", model=model, reason=reason)
