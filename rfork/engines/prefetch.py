"""Fetches a server's weights and JIT caches while its engine starts. Runs in the process of `rfork launch`.

An engine imports and initialises for many seconds before it needs weights. Meanwhile a holder on this host fetches
them, and the engine maps them. If the host has a holder of its own, the planner passes the request on to it: a report
of a holder without memory selects the weights. Otherwise a one-shot holder is started, which ends once the engine has
the weights. A prefetch delays nothing: the engine starts at once, and forks as usual if there is no holder.

If JIT caches are enabled (RFORK_ARTIFACTS_KINDS), `rfork cache pull` copies at the same time what instances of the
model have compiled into the engine's cache folders. Entries appear there complete, so they may also arrive after the
engine has begun to compile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Final

from pydantic import BaseModel, ValidationError
from typing_extensions import Self

from rfork import settings as options
from rfork.engine_command import EngineName, ModelArguments, model_arguments
from rfork.engines.arguments import canonical_model_name
from rfork.engines.flags import variable
from rfork.errors import RforkError
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.schema import HolderReport, ImageSelector
from rfork.settings import ArtifactSettings, InstanceSettings, StorageSettings, variables_of
from rfork.storage.versions.version import version_of_files

log = logger(__name__)

STOP_S: Final = 10.0
"""Maximum time for the one-shot holder to end, and for the planner to forget the request."""
OWN_VARIABLES: Final = ("replica", "peer_port", "http_port")
"""Settings that belong to the engine's own instances: the holder must not have them."""

PREFETCH_NICE: Final = 10
"""CPU priority of the one-shot holder and of `rfork cache pull`, as for nice(1)."""
CACHE_TYPES_VARIABLE: Final = variables_of(ArtifactSettings, "kinds")[0]

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


class Prefetch:
    """One prefetch, from `__enter__` to `__exit__`. Failures are logged: they never end the server."""

    def __init__(
        self,
        engine: EngineName,
        arguments: Sequence[str],
        settings: InstanceSettings,
        environment: Mapping[str, str],
        *,
        connect: Callable[[InstanceSettings], PlannerClient] = PlannerClient.of,
        start_process: StartProcess | None = None,
    ) -> None:
        """`arguments`: those of the engine; `environment`: that of the server."""
        self._engine: EngineName = engine
        self._arguments = arguments
        self._settings = settings
        self._environment = environment
        self._connect = connect
        self._start_process = start_process or _start_process
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        if settings.planner is not None and settings.prefetch == "auto":
            self._threads.append(threading.Thread(target=self._run, name="rfork-prefetch", daemon=True))
            if environment.get(CACHE_TYPES_VARIABLE):
                self._threads.append(threading.Thread(target=self._pull_caches, name="rfork-caches", daemon=True))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * STOP_S)

    def _run(self) -> None:
        try:
            selector = selector_of(self._engine, self._arguments, self._settings)
            if selector is None:
                log.info("weights not prefetched", reason="the command's arguments do not contain the model")
                return
            with self._connect(self._settings) as planner:
                holders = planner.holders(host=self._settings.node_name)
                if any(holder.report.follows_host for holder in holders):
                    self._request(planner, selector)
                    return
            self._run_holder(selector)
        except RforkError as error:
            log.info("weights not prefetched", reason=str(error))
        except Exception:  # a bug must not end the server
            log.exception("weights not prefetched")

    def _request(self, planner: PlannerClient, selector: ImageSelector) -> None:
        """Let the holder of this host keep the weights until the engine serves them, or for a fork's deadline."""
        settings = self._settings
        report = HolderReport(
            holder_id=f"launch-{settings.replica}",
            placement=settings.placement,
            memory_bytes=0,
            selectors=(selector,),
            follows_host=False,
        )
        log.info("the host's holder prefetches the weights", model=selector.model, version=selector.version)
        remaining_s = settings.deadline_s
        try:
            while remaining_s > 0:
                pause_s = min(planner.report_holder(report).heartbeat_s, remaining_s)
                if self._stopped.wait(pause_s):
                    return
                remaining_s -= pause_s
        finally:
            planner.remove_holder(report.holder_id)

    def _run_holder(self, selector: ImageSelector) -> None:
        selected = selector.model if selector.version is None else f"{selector.model}@{selector.version}"
        command = [sys.executable, "-m", "rfork", "hold", "--one-shot", "--models", selected]
        command += ["--until-pid", str(os.getpid())]
        process = self._start_process(command, self._own_environment(), subprocess.DEVNULL)
        log.info("a holder prefetches the weights", model=selector.model, version=selector.version, pid=process.pid)
        exit_code = self._wait(process)
        if exit_code:
            log.warning("the holder ended, the engine forks without it", exit_code=exit_code)

    def _pull_caches(self) -> None:
        try:
            found = model_arguments(self._engine, self._arguments)
            if found is None:
                return  # logged for the weights
            command = [sys.executable, "-m", "rfork", "cache", "pull", "--json"]
            command += ["--model", _model_name(found, self._settings)]
            # Its own messages describe one fork in detail; the result is logged here.
            environment = {**self._own_environment(), variable("log_level"): "warning"}
            with tempfile.TemporaryFile() as output:
                exit_code = self._wait(self._start_process(command, environment, output))
                output.seek(0)
                text = output.read()
            if exit_code is None:
                return
            if exit_code:
                log.info("JIT caches not prefetched", reason=f"rfork cache pull ended with exit code {exit_code}")
                return
            result = PullResult.model_validate_json(text)
            if result.source is None:
                log.info("JIT caches not prefetched", reason=result.reason)
            else:
                log.info("JIT caches prefetched", **result.model_dump(exclude_none=True))
        except (OSError, ValidationError, RforkError) as error:
            log.info("JIT caches not prefetched", reason=str(error))
        except Exception:  # a bug must not end the server
            log.exception("JIT caches not prefetched")

    def _own_environment(self) -> dict[str, str]:
        """Return the server's environment without the settings of the engine's own instances."""
        excluded = {variable(name) for name in OWN_VARIABLES}
        return {name: value for name, value in self._environment.items() if name not in excluded}

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Return the exit code of the process, or None if it was terminated because the server has ended."""
        while process.poll() is None:
            if self._stopped.wait(1.0):
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                return None
        return process.returncode


def selector_of(engine: EngineName, arguments: Sequence[str], settings: InstanceSettings) -> ImageSelector | None:
    """Return the weights that the engine will request, named as its plug-in names them; None if they are unknown.

    Raises StorageError types for unreadable files.
    """
    found = model_arguments(engine, arguments)
    if found is None:
        return None
    version = settings.version or version_of_files(found.path, found.revision, options.load(StorageSettings))
    return ImageSelector(model=_model_name(found, settings), version=version)


def _model_name(found: ModelArguments, settings: InstanceSettings) -> str:
    """Return the name under which the engine's instances will be registered."""
    return settings.model or found.served_name or canonical_model_name(found.path)


def _start_process(
    command: Sequence[str], environment: Mapping[str, str], stdout: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a command in its own session, as the engine is, and with less CPU priority: the engine's start decides."""
    process = subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=stdout, start_new_session=True
    )
    with suppress(OSError):  # it may have ended
        os.setpriority(os.PRIO_PROCESS, process.pid, PREFETCH_NICE)
    return process
