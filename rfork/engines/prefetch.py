"""Fetches a server's weights and JIT caches while its engine starts. Runs in the process of `rfork launch`.

An engine imports and initialises for many seconds before it needs weights. Meanwhile a holder on this host fetches
them, and the engine maps them. If the host has a holder of its own, the planner passes the request on to it: a report
of a holder without memory selects the weights. Otherwise a one-shot holder is started, which ends once the engine has
the weights. A prefetch delays nothing: the engine starts at once, and forks as usual if there is no holder.

If JIT caches are enabled (RFORK_ARTIFACTS_KINDS), those that instances of the model have compiled are copied at the
same time into the engine's cache directories.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final

from typing_extensions import Self

from rfork import settings as options
from rfork.engine_command import EngineName, ModelArguments, model_arguments
from rfork.engines.arguments import canonical_model_name
from rfork.errors import RforkError
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.prefetch_process import (
    CACHE_TYPES_VARIABLE,
    STOP_S,
    StartProcess,
    environment_of_others,
    pull_caches,
    start_process,
    wait_for,
)
from rfork.schema import HolderReport, ImageSelector
from rfork.settings import InstanceSettings, StorageSettings
from rfork.storage.versions.version import version_of_files

log = logger(__name__)

JOIN_S: Final = 2 * STOP_S
"""Maximum time for the one-shot holder to end, and for the planner to forget the request."""


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
        start_process: StartProcess = start_process,
    ) -> None:
        """`arguments`: those of the engine; `environment`: that of the server."""
        self._engine: EngineName = engine
        self._arguments = arguments
        self._settings = settings
        self._environment = environment
        self._connect = connect
        self._start_process = start_process
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
            thread.join(JOIN_S)

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
        process = self._start_process(command, environment_of_others(self._environment), subprocess.DEVNULL)
        log.info("a holder prefetches the weights", model=selector.model, version=selector.version, pid=process.pid)
        exit_code = wait_for(process, self._stopped)
        if exit_code:
            log.warning("the holder ended, the engine forks without it", exit_code=exit_code)

    def _pull_caches(self) -> None:
        with suppress(RforkError):  # logged for the weights
            found = model_arguments(self._engine, self._arguments)
            if found is not None:
                model = _model_name(found, self._settings)
                pull_caches(model, self._environment, self._stopped, self._start_process)


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
