"""In the process that starts vLLM's engines: one name for all ranks of the server, and their end.

vLLM sends its engines SIGTERM and, unless ``--shutdown-timeout`` says otherwise, SIGKILL right after it: a
rank has no time to see its readers off. So that is done here, before: on SIGTERM the API server still
answers while its seeds are drained, for no longer than anybody reads, and the setting `drain_s`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from rfork.engine_command import LOAD_FORMAT
from rfork.engines.monkeypatch import patch_method

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from rfork.settings import InstanceSettings

REPLICA: Final = "RFORK_REPLICA"
"""The variable that tells the engines' processes what their ids begin with."""
SETTINGS: Final = "rfork_settings"
"""Of a manager: the settings of the server whose engines it starts."""

Method = Callable[..., None]


class Manager(Protocol):
    """What is used of vLLM's manager of engines' processes."""

    def finished_processes(self) -> dict[str, int]:
        """The processes that have ended."""
        ...


def hook_engine_manager() -> None:
    """Wrap the class that starts engines, in a process that has imported it. Again is harmless."""
    module = sys.modules.get("vllm.v1.engine.utils")
    manager: Any = getattr(module, "CoreEngineProcManager", None)
    if manager is not None:
        patch_method(manager, "__init__", _start)
        patch_method(manager, "shutdown", _stop)


def _start(method: Method, manager: Manager, *args: object, **named: object) -> None:
    config = named.get("vllm_config") or next((arg for arg in args if hasattr(arg, "load_config")), None)
    with _replica_env(_prepare(manager, config)) if config is not None else contextlib.nullcontext():
        method(manager, *args, **named)


@contextlib.contextmanager
def _replica_env(replica: str | None) -> Iterator[None]:
    """Tell the name to the children that are started meanwhile, and to no others: those of another server."""
    before = os.environ.get(REPLICA)
    if replica is not None:
        os.environ[REPLICA] = replica
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(REPLICA, None)
        else:
            os.environ[REPLICA] = before


def _prepare(manager: Manager, config: VllmConfig) -> str | None:
    """Name the server, and say now what is wrong with its options. Raises SettingsError.

    Returns the name, if rfork forks it.
    """
    if config.load_config.load_format != LOAD_FORMAT:
        return None
    from rfork.engines.vllm.options import attach_log_handler, settings_of
    from rfork.planner_client.ownership import owner_secret

    settings = settings_of(config.load_config)
    attach_log_handler(settings.log_level)
    if settings.replica is None:
        settings = settings.model_copy(update={"replica": f"vllm-{uuid4().hex[:12]}"})
    owner_secret(settings)  # read now: its file may be gone when the server ends
    setattr(manager, SETTINGS, settings)
    return settings.replica


def _stop(method: Method, manager: Manager, timeout: float | None = None) -> None:
    settings: InstanceSettings | None = vars(manager).pop(SETTINGS, None)
    if settings is not None and not manager.finished_processes():
        drain_server(settings)
    method(manager, timeout)


def drain_server(settings: InstanceSettings) -> None:
    """Drain all seeds of this server, and wait until nobody reads from them; whatever fails is logged."""
    from rfork.errors import RforkError
    from rfork.logs import logger
    from rfork.planner_client.client import PlannerClient
    from rfork.planner_client.drain import drain_replica

    log = logger(__name__)
    if settings.planner is None or settings.replica is None:
        return
    try:
        with PlannerClient.of(settings) as planner:
            ended = drain_replica(planner, settings.replica, wait_s=settings.drain_timeout_s, force=True)
            for each in ended:
                log.info("drained", instance_id=each.instance_id, because=each.reason)
                planner.remove(each.instance_id)  # they have no time to say so themselves
    except RforkError as error:
        log.warning("the seeds of this server are not drained", because=str(error))
    else:
        log.info("seeds drained", seeds=len(ended), in_use=sum(not each.can_exit for each in ended))
