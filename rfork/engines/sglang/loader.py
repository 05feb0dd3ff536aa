"""Load format ``rfork``: forks a model from a running instance, or loads it with SGLang's own loader."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_loader.loader import BaseModelLoader
from torch import nn

from rfork import settings as options
from rfork.engines import relocation, weight_cache
from rfork.engines.load_or_fork import cap_deadline, load_or_fork
from rfork.engines.relocation import Weights, WeightsOf
from rfork.engines.served_model import served_model
from rfork.engines.sglang import compat, hooks, identity, methods
from rfork.engines.sglang.identity import identity_of
from rfork.engines.shared_tensors import main_model, remember_main
from rfork.engines.weight_lifecycle import attach_lifecycle, lifecycle_of
from rfork.errors import CheckpointError, ModelError, RforkError
from rfork.logs import logger
from rfork.placement.placement_map import PlacementMap, TensorTable
from rfork.placement.recorder import Recorder
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
        try:
            settings = options.load(InstanceSettings)
            if (timeout_s := compat.load_timeout_s()) is not None:
                settings = cap_deadline(settings, timeout_s)
            holder = weight_cache.holder_id()
            own = _without_rfork(self.load_config, model_config)
            module = load_or_fork(
                SglangEngine(
                    own,
                    model_config,
                    device_config,
                    identity.unsupported_config(model_config),
                    settings.forkable_methods,
                ),
                lambda: identity_of(model_config, self.load_config, device_config, settings),
                settings,
                no_seed_reason=compat.no_seed_reason(hooks.install()) if holder is None else None,
                holder=holder,
            )
            if (served := served_model(module)) is not None:
                shares = identity.sharing_of(model_config) is not None
                attach_lifecycle(module, served, shares_with=lifecycle_of(main_model()) if shares else None)
            if not model_config.is_draft_model:
                remember_main(module)
            return module
        except RforkError as error:
            # SGLang reports it as a traceback, in which this line must be easy to find.
            log.error("cannot start the server: no weights", reason=str(error), hint=error.hint)
            raise


def choose_loader(choose: Callable[..., BaseModelLoader], load_config: LoadConfig, *args: Any, **kwargs: Any) -> Any:
    """Wrap SGLang's choice of a loader: a loader class is always used."""
    if load_config.load_format is RforkLoader:
        return RforkLoader(load_config)
    return choose(load_config, *args, **kwargs)


class SglangEngine:
    """Builds one model with SGLang.

    Implements `rfork.engines.load_or_fork.EngineAdapter` and `rfork.engines.relocation.RelocatingEngine`.
    """

    def __init__(
        self,
        config: LoadConfig,
        model_config: ModelConfig,
        device_config: DeviceConfig,
        refusal: str | None = None,
        forkable_methods: Collection[str] = (),
    ) -> None:
        """`config` is the load configuration without rfork.

        `refusal` is the reason why the model cannot be forked, if any. `forkable_methods` are accepted besides those
        that rfork knows.
        """
        self._config = config
        self._model_config = model_config
        self._device_config = device_config
        self._refusal = refusal
        self._forkable_methods = forkable_methods

    def empty(self) -> nn.Module:
        """Return the model as SGLang's loader leaves it, but with undefined weights.

        It is built by SGLang's loader of dummy weights. In all supported versions that loader takes the steps of the
        loader with weights, in the same order: it builds the model, fills the parameters with finite values, which
        quantisation reads, calls `post_load_weights`, and processes the weights of all quantised modules but those
        that create theirs quantised. Only parameters that CPU offload has moved, and an option to quantise on the
        CPU, are handled differently, and neither can be forked.
        """
        if self._refusal is not None:
            raise ModelError(self._refusal)
        if compat.is_quantized_on_cpu():
            raise ModelError(f"{' and '.join(compat.CPU_QUANTIZATION)} cannot be used with rfork")
        self._check_loader()
        reason = identity.unsupported_class(
            identity.model_class(self._model_config)
        ) or methods.unsupported_configuration(self._model_config.quantization, self._forkable_methods)
        if reason is not None:
            raise ModelError(reason)
        compat.rotary_tables().clear()
        dummy = dataclasses.replace(self._config, load_format=hooks.DUMMY, model_loader_extra_config={})
        loader = _own_loader(dummy, self._model_config)
        with _few_random_values():
            model = loader.load_model(model_config=self._model_config, device_config=self._device_config)
        device_type = str(self._device_config.device).partition(":")[0]
        reason = identity.unsupported_model(model) or methods.unsupported_method(
            model, device_type, self._forkable_methods
        )
        if reason is not None:
            raise ModelError(reason)
        return self._with_full_rope_tables(model)

    def _check_loader(self) -> None:
        """Raise ModelError if SGLang's own loader does more than load the weights of the model into its tensors."""
        from sglang.srt.model_loader.loader import DefaultModelLoader

        loader = _own_loader(self._config, self._model_config)
        quantizes = bool(getattr(self._model_config, "modelopt_quant", None))
        if type(loader) is DefaultModelLoader and not quantizes:
            return
        # Its subclasses quantise the weights, unless the files contain them quantised.
        is_quantized = getattr(self._model_config, "_is_already_quantized", None)
        if quantizes or not isinstance(loader, DefaultModelLoader) or is_quantized is None or not is_quantized():
            raise ModelError(f"models loaded by {type(loader).__name__} cannot be built without their weights")

    def load(self) -> nn.Module:
        """Return a model from SGLang's own loader. Raises CheckpointError if there are no files to load."""
        self.check()
        compat.rotary_tables().clear()  # all models of a process share them: filling one must not change another
        loader = _own_loader(self._config, self._model_config)
        return self._with_full_rope_tables(
            loader.load_model(model_config=self._model_config, device_config=self._device_config)
        )

    def check(self) -> None:
        """Raise CheckpointError for a folder that contains no weight files SGLang could load."""
        folder = Path(self._model_config.model_path)
        if folder.is_dir() and not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
            raise CheckpointError(f"there are no weights in {folder}", hint="start a seed, or add the weight files")

    def checkpoint_tensors(self) -> TensorTable | None:
        """See `RelocatingEngine.checkpoint_tensors`."""
        if compat.option("model_checksum", None) is not None:
            return None  # SGLang would digest all files
        loader: Any = _own_loader(self._config, self._model_config)
        if not hasattr(loader, "_get_all_weights"):
            return None

        def read_all(device: torch.device) -> None:
            with self._twin(device) as twin:  # its class may name other files
                list(loader._get_all_weights(self._model_config, twin))

        return relocation.checkpoint_tensors(loader, read_all)

    def record(self, checkpoint: TensorTable) -> PlacementMap:
        """See `RelocatingEngine.record`. Raises ModelError if SGLang does more than load the checkpoint's tensors."""
        if self._refusal is not None:
            raise ModelError(self._refusal)
        self._check_loader()
        return relocation.record(checkpoint, self._load_twin)

    def live_tensors(self, module: nn.Module, placement_map: PlacementMap) -> tuple[dict[str, torch.Tensor], str]:
        """See `RelocatingEngine.live_tensors`."""
        device_type = str(self._device_config.device).partition(":")[0]
        refusal = partial(methods.changing_method, device_type=device_type)
        return relocation.unchanged_tensors(module, placement_map, refusal)

    def load_from(self, weights_of: WeightsOf) -> nn.Module:
        """See `RelocatingEngine.load_from`."""
        self._check_loader()
        compat.rotary_tables().clear()
        loader: Any = _own_loader(self._config, self._model_config)
        loader._get_all_weights = lambda model_config, model: iter(self._chosen(weights_of(model)))
        return self._with_full_rope_tables(
            loader.load_model(model_config=self._model_config, device_config=self._device_config)
        )

    def _load_twin(self, device: torch.device, recorder: Recorder, weights: Weights) -> nn.Module:
        from sglang.srt.model_loader.loader import DefaultModelLoader

        load_only = getattr(DefaultModelLoader, "load_weights_only", None)
        chosen = self._chosen(weights)
        with self._twin(device) as twin, recorder:
            if load_only is not None:  # it renames the tensors of some formats
                load_only(twin, chosen, torch.device(self._device_config.device))
            else:
                load_weights: Any = twin.load_weights
                load_weights(chosen)
        return twin

    @contextlib.contextmanager
    def _twin(self, device: torch.device) -> Iterator[nn.Module]:
        """A model that SGLang builds like the one it loads.

        On the meta device its weights have no memory; in host memory it is allocated, but never written.
        """
        module: Any = sys.modules[BaseModelLoader.__module__]
        with relocation.no_trace(compat.rotary_tables(), self._model_config.dtype, "sglang"):
            quant_config = module._get_quantization_config(self._model_config, self._config)
            with device:
                twin: nn.Module = module._initialize_model(self._model_config, self._config, quant_config)
            yield twin

    def _chosen(self, weights: Weights) -> Weights:
        """Return the weights that SGLang reads: for one of several draft layers, it omits those of the others."""
        from sglang.srt.model_loader.loader import DefaultModelLoader

        index = getattr(self._config, "draft_model_idx", None)
        if index is None:
            return weights
        chosen: Weights = DefaultModelLoader._filter_mtp_weights(weights, "", index)
        return chosen

    def _with_full_rope_tables(self, model: nn.Module) -> nn.Module:
        """Extend the rotary tables to the length SGLang needs, because it would replace them later."""
        compat.reserve_rotary_tables(model, self._model_config)
        return model


@contextlib.contextmanager
def _few_random_values() -> Iterator[None]:
    """Let SGLang's dummy weights be undefined where nothing reads them: on a CPU, random ones take 4 s per GB."""
    module: Any = sys.modules[BaseModelLoader.__module__]
    initialize = getattr(module, compat.INITIALIZE, None)
    if initialize is None:
        yield
        return

    def initialize_few(model: Any, *args: Any, **kwargs: Any) -> None:
        def remove(_: nn.Module, listed: dict[str, object], prefix: str, metadata: object) -> None:
            for name in methods.relocated_weights(model):
                listed.pop(name, None)

        hook = model.register_state_dict_post_hook(remove)
        try:
            initialize(model, *args, **kwargs)
        finally:
            hook.remove()

    setattr(module, compat.INITIALIZE, initialize_few)
    try:
        yield
    finally:
        setattr(module, compat.INITIALIZE, initialize)


def _without_rfork(config: LoadConfig, model_config: ModelConfig) -> LoadConfig:
    """Return SGLang's load configuration without rfork. SGLang detects file formats only for load format ``auto``."""
    native = not model_config.is_draft_model and compat.is_mistral_format()
    return dataclasses.replace(config, load_format="mistral" if native else "auto")


def _own_loader(config: LoadConfig, model_config: ModelConfig) -> BaseModelLoader:
    from sglang.srt.model_loader.loader import get_model_loader

    return get_model_loader(config, model_config)
