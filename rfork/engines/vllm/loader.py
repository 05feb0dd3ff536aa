"""vLLM's load format ``rfork``: forks a model from a running server or loads it as usual, and makes it a seed.

Runs in each worker of vLLM. The server is not healthy before it returns, because vLLM loads before it
listens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm import __version__, envs
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from rfork.engines import weight_cache
from rfork.engines.vllm import compat
from rfork.errors import ForkFailed

if TYPE_CHECKING:
    from rfork.engines.vllm.model_builder import VllmEngine
    from rfork.settings import InstanceSettings


class RforkModelLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM has no types
    """vLLM model loader. Raises SettingsError for invalid options.

    An incompatible vLLM loads its weights with its own loader, unless forks are required (ForkFailed).
    """

    def __init__(self, load_config: LoadConfig) -> None:
        from rfork.engines.load_or_fork import cap_deadline
        from rfork.engines.vllm.compat import attach_log_handler, load_timeout_s, settings_of

        super().__init__(load_config)
        self.settings: InstanceSettings = cap_deadline(
            settings_of(load_config),
            load_timeout_s(envs),
            "raise VLLM_ENGINE_READY_TIMEOUT_S",
        )
        attach_log_handler(self.settings.log_level)

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "", **options: Any
    ) -> nn.Module:
        """Return the model with its weights, ready to serve. vLLM calls this once per model of the process."""
        # Imported only in a process that loads: vLLM imports the plug-in in all of its processes.
        from rfork.logs import logger

        log = logger(__name__)
        options = {"prefix": prefix, **options}
        builder: VllmEngine | None = None
        try:
            keeps = weight_cache.holder_id() is not None
            decision = compat.decide_installed_daemon(__version__) if keeps else compat.decide_installed(__version__)
            reason = decision.no_fork_reason
            if reason is None:
                for warning in decision.warnings:
                    log.warning(warning)
                builder = self._builder(vllm_config, model_config, options)
                reason = self._prepare(vllm_config, model_config)
        except Exception as error:  # whatever a new version of vLLM has changed
            reason = f"{type(error).__name__}: {error}"
        if reason is None and builder is not None:
            return self._load_or_fork(builder, vllm_config, model_config, decision.no_seed_reason)
        if (required := self.settings.fork_required_reason) is not None:
            raise ForkFailed(
                f"this server cannot be forked: {reason}",
                hint=f"vLLM's own loader is not used, because {required}",
            )
        log.warning("fork not supported, using vLLM's loader without seeding", reason=reason)
        if builder is not None:
            return builder.load()
        module: nn.Module = self._default().load_model(vllm_config=vllm_config, model_config=model_config, **options)
        return module

    def _builder(self, vllm_config: VllmConfig, model_config: ModelConfig, options: Mapping[str, Any]) -> VllmEngine:
        from rfork.engines.vllm.model_builder import VllmEngine

        return VllmEngine(self.load_config, vllm_config, model_config, options, self.settings.forkable_methods)

    def _prepare(self, vllm_config: VllmConfig, model_config: ModelConfig) -> str | None:
        """Hook the worker and prepare vLLM for a fork. Returns why this server cannot be forked; None if it can."""
        from rfork.engines.vllm.hooks import install
        from rfork.engines.vllm.identity import unsupported_config

        if reason := unsupported_config(vllm_config, model_config):
            return reason
        if weight_cache.holder_id() is None:  # a weight cache daemon has no worker
            install(compat.worker_class())
        forks = self.settings.planner is not None or self.settings.snapshot is not None
        if forks and torch.device(vllm_config.device_config.device).type == "cpu":
            compat.keep_weights_on_cpu()
        return None

    def _load_or_fork(
        self, builder: VllmEngine, vllm_config: VllmConfig, model_config: ModelConfig, no_seed_reason: str | None
    ) -> nn.Module:
        from rfork.engines.load_or_fork import load_or_fork
        from rfork.engines.served_model import served_model
        from rfork.engines.shared_tensors import main_model, remember_main
        from rfork.engines.vllm.draft_tensors import shared_patterns
        from rfork.engines.vllm.identity import identity_of, is_draft
        from rfork.engines.weight_lifecycle import attach_lifecycle, lifecycle_of

        module = load_or_fork(
            builder,
            lambda: identity_of(vllm_config, model_config, self.settings),
            self.settings,
            builder.rebuild,
            no_seed_reason,
            holder=weight_cache.holder_id(),
        )
        main = main_model() if shared_patterns(module) else None
        if (served := served_model(module)) is not None:
            attach_lifecycle(module, served, observe_loads=True, shares_with=lifecycle_of(main))
        if not is_draft(vllm_config, model_config):
            remember_main(module)
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
        """Return vLLM's own checkpoint loader."""
        from vllm.config import replace
        from vllm.model_executor.model_loader import get_model_loader

        return get_model_loader(replace(self.load_config, load_format="auto", model_loader_extra_config={}))
