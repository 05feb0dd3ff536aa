"""vLLM's load format ``rfork``: forks a model from a running server or loads it as usual, and makes it a seed.

Runs in each worker of vLLM. The server is not healthy before it returns, because vLLM loads before it
listens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm import __version__, envs
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from rfork.engines.vllm import compat
from rfork.errors import ForkFailed

if TYPE_CHECKING:
    from rfork.settings import InstanceSettings


class RforkModelLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM has no types
    """vLLM model loader. Raises EngineMismatch for an incompatible vLLM and SettingsError for invalid options."""

    def __init__(self, load_config: LoadConfig) -> None:
        from rfork.engines.load_or_fork import cap_deadline
        from rfork.engines.vllm.compat import attach_log_handler, settings_of

        super().__init__(load_config)
        compat.check(__version__)
        self.settings: InstanceSettings = cap_deadline(
            settings_of(load_config),
            envs.VLLM_ENGINE_READY_TIMEOUT_S,
            "raise VLLM_ENGINE_READY_TIMEOUT_S",
        )
        attach_log_handler(self.settings.log_level)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Return the model with its weights, ready to serve. vLLM calls this once per model of the process."""
        # Imported only in a process that loads: vLLM imports the plug-in in all of its processes.
        from rfork.engines.load_or_fork import load_or_fork
        from rfork.engines.served_model import served_model
        from rfork.engines.vllm import identity
        from rfork.engines.vllm.hooks import install
        from rfork.engines.vllm.identity import identity_of
        from rfork.engines.vllm.model_builder import VllmEngine, keep_weights_on_cpu
        from rfork.engines.weight_lifecycle import attach_lifecycle
        from rfork.logs import logger

        engine = VllmEngine(self.load_config, vllm_config, model_config, prefix)
        if reason := identity.unsupported_config(vllm_config, model_config):
            if self.settings.fail_if_not_forked:
                raise ForkFailed(
                    f"this server cannot be forked: {reason}",
                    hint="unset RFORK_FAIL_IF_NOT_FORKED to start it with vLLM's own loader",
                )
            logger(__name__).warning("fork not supported, using vLLM's loader without seeding", reason=reason)
            return engine.load()
        install(worker_class())
        forks = self.settings.planner is not None or self.settings.snapshot is not None
        if forks and torch.device(vllm_config.device_config.device).type == "cpu":
            keep_weights_on_cpu()
        module = load_or_fork(
            engine,
            lambda: identity_of(vllm_config, model_config, self.settings),
            self.settings,
            engine.rebuild,
        )
        if (served := served_model(module)) is not None:
            attach_lifecycle(module, served, observe_loads=True)
        return module

    def download_model(self, model_config: ModelConfig) -> None:
        """Delegate to vLLM's own loader: a fork needs no download."""
        self._default().download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the checkpoint into a model that is not post-processed yet."""
        self._default().load_weights(model, model_config)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors, from which vLLM reloads weights in place."""
        yield from self._default().get_all_weights(model_config, model)

    def _default(self) -> BaseModelLoader:
        from rfork.engines.vllm.model_builder import default_loader

        return default_loader(self.load_config)


def worker_class() -> type:
    """Return the class whose methods vLLM's workers run."""
    from vllm.v1.worker.gpu_worker import Worker

    found: type = Worker
    return found
