"""Builds vLLM models: empty in their final layout, or loaded by vLLM's own loader.

Runs in a worker, on the thread that loads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import LoadConfig, ModelConfig, VllmConfig, replace
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from rfork.engines import relocation
from rfork.engines.relocation import Weights, WeightsOf
from rfork.engines.vllm import compat, methods
from rfork.errors import ALL_TENSORS, CheckpointError, UnsupportedTensor
from rfork.logs import logger
from rfork.placement.placement_map import PlacementMap, TensorTable
from rfork.placement.recorder import Recorder

log = logger(__name__)

Check = Callable[[nn.Module], None]
"""Checks an unprocessed model; raises UnsupportedTensor."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
"""Files that vLLM's load format ``auto`` reads."""


class VllmEngine:
    """Builds one model with vLLM.

    Implements `rfork.engines.load_or_fork.EngineAdapter` and `rfork.engines.relocation.RelocatingEngine`.
    """

    def __init__(
        self,
        load_config: LoadConfig,
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        options: Mapping[str, Any],
        forkable_methods: Collection[str] = (),
    ) -> None:
        """`options` are the other arguments of vLLM's `load_model`, such as the prefix.

        `forkable_methods` are accepted besides those that rfork knows.
        """
        self._load_config = load_config
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._options = options
        self._device = torch.device(vllm_config.device_config.device)
        self._check = partial(_check_methods, device_type=self._device.type, accepted=forkable_methods)
        compilation = vllm_config.compilation_config
        self._layers = frozenset(compilation.static_forward_context)
        self._experts = len(compilation.static_all_moe_layers)

    def empty(self) -> nn.Module:
        """See `EngineAdapter.empty`. Raises UnsupportedTensor if the image would be incomplete."""
        module = self._load_with(dummy_loader(self._load_config, self._check))
        if reason := compat.unsupported_model(module):
            raise UnsupportedTensor(ALL_TENSORS, reason)
        return module

    def load(self) -> nn.Module:
        """See `EngineAdapter.load`. Raises CheckpointError like `check`, in one line instead of vLLM's many."""
        self.check()
        self._unregister_layers()
        return self._load_with(default_loader(self._load_config))

    def check(self) -> None:
        """See `EngineAdapter.check`. Models on the hub are not checked."""
        folder = Path(self._model_config.model)
        if folder.is_dir() and not _has_weights(folder):
            raise CheckpointError(
                f"there are no weights in {folder}", hint="only a fork or a snapshot can fill this model"
            )

    def rebuild(self, module: nn.Module) -> None:
        """Rebuild what kernels derived from the weights, which are now present.

        Uses vLLM's own path for pre-processed weights. It changes no tensor: `methods.is_rebuilt` is true only
        for methods for which that is known.
        """
        rebuilt = [layer for layer in module.modules() if methods.is_rebuilt(layer, self._device.type)]
        if not rebuilt:
            return
        from vllm.model_executor.model_loader.utils import device_loading_context

        with compat.weights_already_processed():
            for layer in rebuilt:
                method: Any = layer.quant_method
                moving = getattr(method, "requires_device_loading", True)
                with device_loading_context(layer, self._device) if moving else contextlib.nullcontext():
                    method.process_weights_after_loading(layer)

    def checkpoint_tensors(self) -> TensorTable | None:
        """See `RelocatingEngine.checkpoint_tensors`."""
        loader: Any = default_loader(self._load_config)

        def read_all(device: torch.device) -> None:
            with self._twin(device) as twin:  # its class may name other files
                list(loader.get_all_weights(self._model_config, twin))

        return relocation.checkpoint_tensors(loader, read_all)

    def record(self, checkpoint: TensorTable) -> PlacementMap:
        """See `RelocatingEngine.record`."""
        if compat.is_quantised_online(self._vllm_config):
            raise UnsupportedTensor(ALL_TENSORS, "vLLM quantises it while it loads")
        return relocation.record(checkpoint, self._load_twin)

    def live_tensors(self, module: nn.Module, placement_map: PlacementMap) -> tuple[dict[str, torch.Tensor], str]:
        """See `RelocatingEngine.live_tensors`."""
        refusal = partial(methods.changing_method, device_type=self._device.type)
        return relocation.unchanged_tensors(module, placement_map, refusal)

    def load_from(self, weights_of: WeightsOf) -> nn.Module:
        """See `RelocatingEngine.load_from`."""
        self._unregister_layers()
        return self._load_with(_loader_of(self._load_config, weights_of))

    def _load_twin(self, device: torch.device, recorder: Recorder, weights: Weights) -> nn.Module:
        with self._twin(device) as twin, recorder:
            _loader_of(self._load_config, lambda _: weights).load_weights(twin, self._model_config)
        return twin

    @contextlib.contextmanager
    def _twin(self, device: torch.device) -> Iterator[nn.Module]:
        """A model that vLLM builds like the one it loads, with a copy of what models change in the configuration.

        On the meta device its weights have no memory; in host memory it is allocated, but never written.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model

        vllm_config = compat.config_of_twin(self._vllm_config)
        with (
            relocation.no_trace(compat.rotary_tables(), self._model_config.dtype, "vllm"),
            set_current_vllm_config(vllm_config),
        ):
            with device:
                twin: nn.Module = initialize_model(
                    vllm_config=vllm_config, model_config=self._model_config, prefix=self._options.get("prefix", "")
                )
            yield twin

    def _load_with(self, loader: BaseModelLoader) -> nn.Module:
        module: nn.Module = loader.load_model(
            vllm_config=self._vllm_config, model_config=self._model_config, **self._options
        )
        return module

    def _unregister_layers(self) -> None:
        """Remove the names of the first model from the compilation configuration, so that a second one may use them."""
        compilation = self._vllm_config.compilation_config
        for name in compilation.static_forward_context.keys() - self._layers:
            del compilation.static_forward_context[name]
        del compilation.static_all_moe_layers[self._experts :]


class _CheckedLoader(DummyModelLoader):  # type: ignore[misc]  # vLLM has no types
    """vLLM's dummy loader, which checks a model before it is processed: that takes long for a large one."""

    def __init__(self, load_config: LoadConfig, check: Check) -> None:
        super().__init__(load_config)
        self._check = check

    def load_weights(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        self._check(model)
        super().load_weights(model, *args, **kwargs)


class _EmptyWeightsLoader(_CheckedLoader):
    """vLLM's dummy loader, which skips initialising weights whose values do not matter.

    Quantisation reads the values, so quantised layers get vLLM's dummy weights. Unquantised linear layers and
    embeddings are only moved. But if a checkpoint unties its embeddings, vLLM compares their values to find
    out whether they are tied after all.
    """

    def load_weights(self, model: nn.Module, model_config: ModelConfig, *args: Any, **kwargs: Any) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
        from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

        self._check(model)
        unread_methods: tuple[type, ...] = (UnquantizedLinearMethod,)
        if not getattr(model_config, "word_embeddings_untied_by_checkpoint", True):
            unread_methods += (UnquantizedEmbeddingMethod,)
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                self._process_online_quant_layer(layer, info)
            elif type(getattr(layer, "quant_method", None)) not in unread_methods:
                for name, tensor in get_layer_tensors(layer).items():
                    if name not in layer._non_persistent_buffers_set:
                        initialize_single_dummy_weight(tensor)


def default_loader(load_config: LoadConfig) -> BaseModelLoader:
    """Return vLLM's own checkpoint loader."""
    return get_model_loader(plain_load_config(load_config, "auto"))


def _loader_of(load_config: LoadConfig, weights_of: WeightsOf) -> BaseModelLoader:
    """Return vLLM's own checkpoint loader, which reads these tensors instead of files."""
    loader: Any = default_loader(load_config)
    loader.get_all_weights = lambda model_config, model: iter(weights_of(model))
    return loader


def dummy_loader(load_config: LoadConfig, check: Check) -> BaseModelLoader:
    """Return vLLM's dummy loader, without the initialisation of weights if vLLM has what that needs.

    It calls `check` with the unprocessed model.
    """
    loader = _EmptyWeightsLoader if compat.can_skip_dummy_weights() else _CheckedLoader
    return loader(plain_load_config(load_config, "dummy"), check)


def _check_methods(module: nn.Module, device_type: str, accepted: Collection[str]) -> None:
    """Raise UnsupportedTensor if the layers of an unprocessed model cannot be forked."""
    if reason := methods.unsupported_method(module, device_type, accepted):
        raise UnsupportedTensor(ALL_TENSORS, reason)


def plain_load_config(load_config: LoadConfig, load_format: str) -> LoadConfig:
    """Return the configuration for another loader, without rfork's options."""
    return replace(load_config, load_format=load_format, model_loader_extra_config={})


def _has_weights(folder: Path) -> bool:
    found = [str(path) for pattern in WEIGHT_FILES for path in folder.glob(pattern)]
    try:
        from vllm.model_executor.model_loader.weight_utils import filter_files_not_needed_for_inference
    except ImportError:
        return bool(found)
    return bool(filter_files_not_needed_for_inference(found))
