"""Load format ``rfork``: a model with its weights from an instance that runs, or by SGLang's own loader."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_loader.loader import BaseModelLoader
from torch import nn

from rfork import settings as options
from rfork.engines.load_or_fork import load_or_fork
from rfork.engines.sglang import unsupported
from rfork.engines.sglang.ranks import cap_deadline, subject_of
from rfork.errors import CheckpointError, ModelError, RforkError
from rfork.logs import logger
from rfork.settings import InstanceSettings

if TYPE_CHECKING:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig

log = logger(__name__)
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
"""What SGLang's own loader looks for."""


class RforkLoader(BaseModelLoader):  # type: ignore[misc]  # SGLang has no types
    """SGLang's loader contract. Made and called in each scheduler process, once for each of its models."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Have the files that SGLang's own loader reads."""
        _own_loader(_without_rfork(self.load_config, model_config), model_config).download_model(model_config)

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        """The model with its weights; it is a seed from then on. Raises as `load_or_fork`."""
        try:
            settings = cap_deadline(options.load(InstanceSettings))
            own = _without_rfork(self.load_config, model_config)
            return load_or_fork(
                SglangEngine(own, model_config, device_config, unsupported.unsupported_config(model_config)),
                lambda: subject_of(model_config, self.load_config, device_config, settings),
                settings,
            )
        except RforkError as error:
            # SGLang tells of it by a traceback, in which one must find this.
            log.error("the server cannot start: no weights", because=str(error), hint=error.hint)
            raise


class SglangEngine:
    """How SGLang makes one model: `rfork.engines.load_or_fork.EngineAdapter`."""

    def __init__(
        self,
        config: LoadConfig,
        model_config: ModelConfig,
        device_config: DeviceConfig,
        refusal: str | None = None,
    ) -> None:
        """`config` is what SGLang would load by without rfork; `refusal` says why that is all it can do."""
        self._config = config
        self._model_config = model_config
        self._device_config = device_config
        self._refusal = refusal
        self._device = torch.device(device_config.device)

    def empty(self) -> nn.Module:
        """The model as SGLang's loader leaves it, after the same steps, but for what the weights are."""
        from sglang.srt.model_loader import loader as own
        from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

        if self._refusal is not None:
            raise ModelError(self._refusal)
        loader = _own_loader(self._config, self._model_config)
        if not isinstance(loader, own.DefaultModelLoader) or getattr(self._model_config, "modelopt_quant", None):
            raise ModelError(f"models of {type(loader).__name__} cannot be made without their weights")
        _clear_shared_caches()
        quantization = own._get_quantization_config(self._model_config, self._config)
        with own.set_default_torch_dtype(self._model_config.dtype):
            with self._device:
                model = own._initialize_model(self._model_config, self._config, quantization)
            if why := unsupported.unsupported_model(model):
                raise ModelError(why)
            if quantization is not None:
                initialize_dummy_weights(model)  # quantisation looks at the numbers: they must be finite
            # Its loader runs these in this order, the first as the last step of `model.load_weights`.
            own.post_load_weights(model)
            for module, method in own._modules_with_quant_method(model):
                if not _quantized_before(module):
                    with own.device_loading_context(module, self._device):
                        method.process_weights_after_loading(module)
        return self._is_complete(model.eval())

    def load(self) -> nn.Module:
        """A model by SGLang's own loader. Raises CheckpointError where it has no files to load."""
        self.check()
        _clear_shared_caches()
        loader = _own_loader(self._config, self._model_config)
        return self._is_complete(loader.load_model(model_config=self._model_config, device_config=self._device_config))

    def check(self) -> None:
        """Raises CheckpointError for a folder in which nothing is that SGLang could load."""
        folder = Path(self._model_config.model_path)
        if folder.is_dir() and not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
            raise CheckpointError(f"{folder} holds no weights", hint="start a seed, or add the weight files")

    def _is_complete(self, model: nn.Module) -> nn.Module:
        """With rotary tables as long as SGLang wants them: it would put others in their place later."""
        from sglang.srt.utils.common import reserve_rope_cache_for_long_sequences

        reserve_rope_cache_for_long_sequences(model, self._model_config)
        return model


def _without_rfork(config: LoadConfig, model_config: ModelConfig) -> LoadConfig:
    """What SGLang would load by: it looks at the files of a model only where the load format is ``auto``."""
    from sglang.srt.arg_groups.model_path_hook import is_mistral_native_format
    from sglang.srt.runtime_context import get_server_args

    native = not model_config.is_draft_model and is_mistral_native_format(get_server_args())
    return dataclasses.replace(config, load_format="mistral" if native else "auto")


def _own_loader(config: LoadConfig, model_config: ModelConfig) -> BaseModelLoader:
    from sglang.srt.model_loader.loader import get_model_loader

    return get_model_loader(config, model_config)


def _quantized_before(module: nn.Module) -> bool:
    """Whether the module's weights are quantised as it is made; SGLang's dummy loader looks at the same."""
    quantized = getattr(module, "is_weights_quantized", None)
    return bool(quantized and quantized())


def _clear_shared_caches() -> None:
    """Rotary tables are shared by all models of a process: one that is filled must not be another's."""
    from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT

    _ROPE_DICT.clear()
