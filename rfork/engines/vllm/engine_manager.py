"""Hooks of the process that starts vLLM's engines: one replica name for all ranks, and the drain at shutdown.

vLLM sends its engines SIGTERM, followed immediately by SIGKILL unless ``--shutdown-timeout`` is set, so a
rank has no time to drain. This process therefore drains first: on SIGTERM the API server still serves
requests while its seeds are drained, until no reads are left, and at most for `drain_timeout_s`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from rfork.engine_command import LOAD_FORMAT
from rfork.engines.hook_targets import patch_method

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from rfork.settings import InstanceSettings

REPLICA: Final = "RFORK_REPLICA"
"""Variable that passes the replica name to the engines' processes."""
SETTINGS: Final = "rfork_settings"
"""Attribute of a manager: the settings of the server whose engines it starts."""

Method = Callable[..., None]


class Manager(Protocol):
    """The part of vLLM's engine process manager that is used here."""

    def finished_procs(self) -> dict[str, int]:
        """Return the processes that have exited."""
        ...


def hook_engine_manager() -> None:
    """Wrap the class that starts engines, if this process has imported it. Idempotent."""
    module = sys.modules.get("vllm.v1.engine.utils")
    manager: Any = getattr(module, "CoreEngineProcManager", None)
    if manager is not None:
        patch_method(manager, "__init__", _start, may_refuse=True)
    if hasattr(manager, "shutdown"):
        patch_method(manager, "shutdown", _stop)


def _start(method: Method, manager: Manager, *args: object, **kwargs: object) -> None:
    config = kwargs.get("vllm_config") or next((arg for arg in args if hasattr(arg, "load_config")), None)
    with _replica_env(_replica_of(manager, config)) if config is not None else contextlib.nullcontext():
        method(manager, *args, **kwargs)


def _replica_of(manager: Manager, config: VllmConfig) -> str | None:
    """Return the name that `_prepare` chose. Only invalid settings stop vLLM."""
    from rfork.errors import SettingsError

    try:
        return _prepare(manager, config)
    except SettingsError:
        raise
    except Exception as error:  # whatever a new version has changed
        from rfork.logs import logger

        logger(__name__).error(
            "the ranks of this server have no common name and will not be drained",
            reason=f"{type(error).__name__}: {error}",
        )
        return None


@contextlib.contextmanager
def _replica_env(replica: str | None) -> Iterator[None]:
    """Pass the name to the children started meanwhile, and not to those of another server."""
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
    """Set the server's replica name and validate its options early. Raises SettingsError.

    Returns the name if the server uses rfork, else None.
    """
    if config.load_config.load_format != LOAD_FORMAT:
        return None
    from rfork.engines.vllm.compat import attach_log_handler, settings_of
    from rfork.planner_client.ownership import owner_secret

    settings = settings_of(config.load_config)
    attach_log_handler(settings.log_level)
    if settings.replica is None:
        settings = settings.model_copy(update={"replica": f"vllm-{uuid4().hex[:12]}"})
    owner_secret(settings)  # read now: the file may be removed before the server exits
    setattr(manager, SETTINGS, settings)
    return settings.replica


def _stop(method: Method, manager: Manager, *args: object, **kwargs: object) -> None:
    settings: InstanceSettings | None = vars(manager).pop(SETTINGS, None)
    if settings is not None and not manager.finished_procs():
        from rfork.engines.launch import drain_server

        drain_server(settings, remove=True)
    method(manager, *args, **kwargs)
