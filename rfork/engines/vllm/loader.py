"""vLLM's load format ``rfork``: a model is forked from a running server, or loaded as ever; then a seed.

Runs in each worker of vLLM. Until it returns, the server is not healthy: vLLM loads before it listens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm import __version__, envs
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from rfork.engines.vllm import hook_targets
from rfork.errors import ForkFailed

if TYPE_CHECKING:
    from rfork.settings import InstanceSettings


class RforkModelLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM has no types
    """See the module. Raises EngineMismatch where this vLLM is another, SettingsError for bad options."""

    def __init__(self, load_config: LoadConfig) -> None:
        from rfork.engines.vllm.options import (  # registering costs less
            attach_log_handler,
            cap_deadline,
            settings_of,
        )

        super().__init__(load_config)
        hook_targets.check(__version__)
        self.settings: InstanceSettings = cap_deadline(settings_of(load_config), envs.VLLM_ENGINE_READY_TIMEOUT_S)
        attach_log_handler(self.settings.log_level)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """The model with its weights, ready to serve; vLLM calls it once for each model in the process."""
        # Only here, in a process that loads: the plug-in is imported in all of vLLM's.
        from rfork.engines.load_or_fork import load_or_fork
        from rfork.engines.served_model import served_model
        from rfork.engines.vllm import unsupported
        from rfork.engines.vllm.hooks import install
        from rfork.engines.vllm.model_builder import VllmEngine, keep_weights_on_cpu
        from rfork.engines.vllm.ranks import subject_of
        from rfork.engines.vllm.weight_lifecycle import attach_lifecycle
        from rfork.logs import logger

        engine = VllmEngine(self.load_config, vllm_config, model_config, prefix)
        if why := unsupported.unsupported_config(vllm_config, model_config):
            if self.settings.fail_if_not_forked:
                raise ForkFailed(f"this server cannot be forked: {why}", hint="unset RFORK_FAIL_IF_NOT_FORKED")
            logger(__name__).warning("not forked, and not a seed: vLLM loads its weights by itself", because=why)
            return engine.load()
        install(worker_class())
        forks = self.settings.planner is not None or self.settings.snapshot is not None
        if forks and torch.device(vllm_config.device_config.device).type == "cpu":
            keep_weights_on_cpu()
        module = load_or_fork(
            engine,
            lambda: subject_of(vllm_config, model_config, self.settings),
            self.settings,
            engine.rebuild,
        )
        if (instance := served_model(module)) is not None:
            attach_lifecycle(module, instance)
        return module

    def download_model(self, model_config: ModelConfig) -> None:
        """As vLLM's own loader: a fork needs no download."""
        self._default().download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """From the checkpoint, into a model that was not processed yet."""
        self._default().load_weights(model, model_config)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors: what vLLM reloads weights in place from."""
        yield from self._default().get_all_weights(model_config, model)

    def _default(self) -> BaseModelLoader:
        from rfork.engines.vllm.model_builder import default_loader

        return default_loader(self.load_config)


def worker_class() -> type:
    """The class whose methods vLLM's workers run."""
    from vllm.v1.worker.gpu_worker import Worker

    found: type = Worker
    return found
