"""Load format ``rfork``: forks a model from a running instance, or loads it with SGLang's own loader."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_loader.loader import BaseModelLoader
from torch import nn

from rfork import settings as options
from rfork.engines.load_or_fork import cap_deadline, load_or_fork
from rfork.engines.served_model import served_model
from rfork.engines.sglang import identity
from rfork.engines.sglang.identity import identity_of
from rfork.engines.weight_lifecycle import attach_lifecycle
from rfork.errors import CheckpointError, ModelError, RforkError
from rfork.logs import logger
from rfork.settings import InstanceSettings

if TYPE_CHECKING:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig

log = logger(__name__)
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
"""Files that SGLang's own loader reads."""


class RforkLoader(BaseModelLoader):  # type: ignore[misc]  # SGLang has no types
    """SGLang model loader. Created and called in each scheduler process, once per model."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Download the files that SGLang's own loader reads."""
        _own_loader(_without_rfork(self.load_config, model_config), model_config).download_model(model_config)

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        """Return the model with its weights and make it a seed. Raises the exceptions of `load_or_fork`."""
        from sglang.srt.model_executor.model_runner_components import load_model_utils

        # The time that the server's ranks wait for one that is loading.
        load_timeout_s = load_model_utils.UNBALANCED_MODEL_LOADING_TIMEOUT_S
        try:
            settings = cap_deadline(options.load(InstanceSettings), load_timeout_s)
            own = _without_rfork(self.load_config, model_config)
            module = load_or_fork(
                SglangEngine(own, model_config, device_config, identity.unsupported_config(model_config)),
                lambda: identity_of(model_config, self.load_config, device_config, settings),
                settings,
            )
            if (served := served_model(module)) is not None:
                attach_lifecycle(module, served)
            return module
        except RforkError as error:
            # SGLang reports it as a traceback, in which this line must be easy to find.
            log.error("cannot start the server: no weights", reason=str(error), hint=error.hint)
            raise


class SglangEngine:
    """Builds one model with SGLang; implements `rfork.engines.load_or_fork.EngineAdapter`."""

    def __init__(
        self,
        config: LoadConfig,
        model_config: ModelConfig,
        device_config: DeviceConfig,
        refusal: str | None = None,
    ) -> None:
        """`config` is the load configuration without rfork.

        `refusal` is the reason why the model cannot be forked, if any.
        """
        self._config = config
        self._model_config = model_config
        self._device_config = device_config
        self._refusal = refusal
        self._device = torch.device(device_config.device)

    def empty(self) -> nn.Module:
        """Return the model as SGLang's loader leaves it, after the same steps, but with undefined weights."""
        from sglang.srt.model_loader import loader as own
        from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

        if self._refusal is not None:
            raise ModelError(self._refusal)
        loader = _own_loader(self._config, self._model_config)
        if not isinstance(loader, own.DefaultModelLoader) or getattr(self._model_config, "modelopt_quant", None):
            raise ModelError(f"models loaded by {type(loader).__name__} cannot be built without their weights")
        _clear_shared_caches()
        quantization = own._get_quantization_config(self._model_config, self._config)
        with own.set_default_torch_dtype(self._model_config.dtype):
            with self._device:
                model = own._initialize_model(self._model_config, self._config, quantization)
            if reason := identity.unsupported_model(model):
                raise ModelError(reason)
            if quantization is not None:
                initialize_dummy_weights(model)  # quantisation reads the values, so they must be finite
            # SGLang's loader runs these in this order, the first as the last step of `model.load_weights`.
            own.post_load_weights(model)
            for module, method in own._modules_with_quant_method(model):
                if not _is_already_quantized(module):
                    with own.device_loading_context(module, self._device):
                        method.process_weights_after_loading(module)
        return self._with_full_rope_tables(model.eval())

    def load(self) -> nn.Module:
        """Return a model from SGLang's own loader. Raises CheckpointError if there are no files to load."""
        self.check()
        _clear_shared_caches()
        loader = _own_loader(self._config, self._model_config)
        return self._with_full_rope_tables(
            loader.load_model(model_config=self._model_config, device_config=self._device_config)
        )

    def check(self) -> None:
        """Raise CheckpointError for a folder that contains no weight files SGLang could load."""
        folder = Path(self._model_config.model_path)
        if folder.is_dir() and not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
            raise CheckpointError(f"there are no weights in {folder}", hint="start a seed, or add the weight files")

    def _with_full_rope_tables(self, model: nn.Module) -> nn.Module:
        """Extend the rotary tables to the length SGLang needs, because it would replace them later."""
        from sglang.srt.utils.common import reserve_rope_cache_for_long_sequences

        reserve_rope_cache_for_long_sequences(model, self._model_config)
        return model


def _without_rfork(config: LoadConfig, model_config: ModelConfig) -> LoadConfig:
    """Return SGLang's load configuration without rfork. SGLang detects file formats only for load format ``auto``."""
    from sglang.srt.arg_groups.model_path_hook import is_mistral_native_format
    from sglang.srt.runtime_context import get_server_args

    native = not model_config.is_draft_model and is_mistral_native_format(get_server_args())
    return dataclasses.replace(config, load_format="mistral" if native else "auto")


def _own_loader(config: LoadConfig, model_config: ModelConfig) -> BaseModelLoader:
    from sglang.srt.model_loader.loader import get_model_loader

    return get_model_loader(config, model_config)


def _is_already_quantized(module: nn.Module) -> bool:
    """Return True if the module creates its weights already quantised, by the check of SGLang's dummy loader."""
    quantized = getattr(module, "is_weights_quantized", None)
    return bool(quantized and quantized())


def _clear_shared_caches() -> None:
    """Clear the rotary tables that all models of a process share: filling one model must not change another."""
    from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT

    _ROPE_DICT.clear()
