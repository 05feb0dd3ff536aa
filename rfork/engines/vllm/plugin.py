"""Entry point that vLLM calls in each of its processes, before it knows what it will serve.

It does little, imports only what vLLM itself has already imported, and never raises: a server that does not
use rfork starts as if rfork were not installed.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from rfork.engine_command import LOAD_FORMAT
from rfork.engines.early_imports import early_imports
from rfork.engines.hook_targets import Method, patch_method
from rfork.engines.vllm.engine_manager import hook_engine_manager
from rfork.engines.vllm.weight_cache import hook_preload
from rfork.logs import logger

INIT_DEVICE = "init_device"
"""Method of vLLM's `WorkerWrapperBase` that initializes the device, just before the model is loaded."""


def register() -> None:
    """Register ``--load-format rfork`` with vLLM. Called in the API server, the engine core and each worker.

    Idempotent.
    """
    try:
        hook_engine_manager()
        hook_preload()
        if not _is_api_server():
            _hook_workers()
            _register_loader()
    except Exception as error:  # vLLM must start without rfork, whatever a new version has changed
        logger(__name__).error(
            "incompatible vLLM version, --load-format rfork is unavailable",
            reason=f"{type(error).__name__}: {error}",
            hint="see the documentation of compatible versions",
        )


def _hook_workers() -> None:
    """Wrap the class that creates a worker, if this process has imported it. Idempotent."""
    wrapper_class: Any = getattr(sys.modules.get("vllm.v1.worker.worker_base"), "WorkerWrapperBase", None)
    if hasattr(wrapper_class, INIT_DEVICE):
        patch_method(wrapper_class, INIT_DEVICE, _init_device)


def _init_device(method: Method, worker: Any, *args: object, **kwargs: object) -> object:
    """Import the modules of a fork meanwhile, if this worker will load its model with rfork."""
    config = getattr(worker, "vllm_config", None)
    if config is None or config.load_config.load_format != LOAD_FORMAT:
        return method(worker, *args, **kwargs)
    with early_imports():
        return method(worker, *args, **kwargs)


def _register_loader() -> None:
    from vllm.model_executor import model_loader

    from rfork.engines.vllm.loader import RforkModelLoader

    # vLLM logs a warning if a format is registered again.
    registered = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if registered.get(LOAD_FORMAT) is not RforkModelLoader:
        model_loader.register_model_loader(LOAD_FORMAT)(RforkModelLoader)


def _is_api_server() -> bool:
    """Return True in the process of ``vllm serve`` itself, which never loads a model; skipping it saves seconds."""
    return (
        multiprocessing.parent_process() is None
        and sys.argv[1:2] == ["serve"]
        and "vllm.entrypoints.cli.serve" in sys.modules
    )
