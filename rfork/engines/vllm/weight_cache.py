"""vLLM's weight cache daemon (``vllm preload``): its ranks fork their weights, and serve them to other hosts.

`vllm preload` starts one process per GPU, which loads no plug-ins and calls other methods of the loader than a worker:
``create_model`` and ``load_weights`` of a model that is processed afterwards, which a fork cannot fill. So the process
is started with `run_daemon`, which lets the daemon call the loader's `load_model`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from rfork.engine_command import LOAD_FORMAT
from rfork.engines.hook_targets import patch_method

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig

DAEMON: Final = "vllm.model_executor.model_loader.weight_cache.daemon"
"""vLLM's module of the daemon, since 0.32."""
RUN: Final = "_run_daemon"
"""Function of that module that a daemon's process runs."""


class Daemon(Protocol):
    """The part of vLLM's WeightCacheDaemon that is used here."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    """Configuration of the model that it keeps, which may be a draft."""
    model: nn.Module | None


def hook_preload() -> None:
    """Let ``vllm preload`` start its daemons with `run_daemon`, if this is its process. Idempotent."""
    if multiprocessing.parent_process() is not None or sys.argv[1:2] != ["preload"]:
        return
    module = import_module(DAEMON)
    if hasattr(module, RUN):
        setattr(module, RUN, run_daemon)


def run_daemon(*args: Any, **kwargs: Any) -> None:
    """Run a daemon of vLLM in its own process, with the load format ``rfork`` if it was chosen."""
    run: Callable[..., None] = getattr(import_module(DAEMON), RUN)
    config = next((each for each in (*args, *kwargs.values()) if hasattr(each, "load_config")), None)
    if config is None or config.load_config.load_format != LOAD_FORMAT:
        run(*args, **kwargs)
        return
    from vllm.plugins import load_general_plugins

    from rfork.engines import weight_cache

    load_general_plugins()  # among them rfork's
    weight_cache.become_holder("vllm")
    install()
    weight_cache.exit_on_sigterm()
    with weight_cache.closing_seeds(math.inf):
        run(*args, **kwargs)


def install() -> None:
    """Wrap the daemon's methods that load and release its model. Idempotent."""
    daemon_class: Any = import_module(DAEMON).WeightCacheDaemon
    # Earlier daemons have no such method and call the loader's `load_model`.
    if hasattr(daemon_class, "get_model"):
        patch_method(daemon_class, "get_model", _get_model, may_refuse=True)
    if hasattr(daemon_class, "_handle_release"):
        patch_method(daemon_class, "_handle_release", _release)


def _get_model(method: Callable[..., nn.Module], daemon: Daemon, *args: object, **kwargs: object) -> nn.Module:
    """Load the daemon's model as a worker does. Raises the exceptions of the loader, and of vLLM's own checks."""
    from vllm.model_executor.model_loader import get_model_loader

    from rfork.engines.vllm.loader import RforkModelLoader

    config = daemon.vllm_config
    loader = get_model_loader(config.load_config)
    if not isinstance(loader, RforkModelLoader):
        return method(daemon, *args, **kwargs)
    _prepare_device(config)
    model = loader.load_model(vllm_config=config, model_config=daemon.model_config)
    _check_exportable(model)
    return model.eval()


def _prepare_device(config: VllmConfig) -> None:
    """Initialize what attention backends may use while the model is built, as vLLM's daemon does."""
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(_device(config))


def _device(config: VllmConfig) -> torch.device:
    import torch

    return torch.device(config.load_config.device or config.device_config.device)


def _check_exportable(model: nn.Module) -> None:
    """Raise vLLM's error if engines could not use the processed weights of this model."""
    check: Callable[[nn.Module], None] | None = getattr(import_module(DAEMON), "check_ipc_quant_support", None)
    if check is not None:
        check(model)


def _release(method: Callable[..., object], daemon: Daemon, *args: object, **kwargs: object) -> object:
    """Stop serving before the daemon frees its model, which an engine may request."""
    from rfork.engines import weight_cache

    weight_cache.release(daemon.model)
    gc.collect()
    return method(daemon, *args, **kwargs)
