"""Runs in SGLang's Python: compares the model of the plug-in's `empty` with that of SGLang's own loader.

``python sglang_builder_probe.py FOLDER`` builds a small model with layers that SGLang processes after loading, one
that is created quantised, one that is not quantised, a tensor that `post_load_weights` derives, and writes
``RESULT {"difference": str | null, "empty": [step, …], "loaded": [step, …], "undefined": [name, …]}``. "undefined":
parameters of the empty model with values that no loader has written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_loader import loader
from torch import nn

from rfork.engines.sglang import compat, identity
from rfork.engines.sglang.loader import SglangEngine
from rfork.image.capture import capture

steps: list[str] = []


class Method:
    """Quantisation method that replaces a layer's weight by a packed one and its scale."""

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Derive the tensors from values that must be finite."""
        steps.append(f"process {layer.name} {bool(torch.isfinite(layer.weight).all())}")
        layer.register_buffer("scale", layer.weight.abs().amax(dim=1))
        layer.weight = nn.Parameter(layer.weight.to(torch.bfloat16).t().contiguous(), requires_grad=False)


class Layer(nn.Module):
    """Layer with a quantisation method."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.full((4, 8), torch.nan), requires_grad=False)
        self.quant_method: Any = Method()


class QuantizedLayer(Layer):
    """Layer whose method finds nothing left to do, as it creates its weight quantised."""

    def is_weights_quantized(self) -> bool:
        """Return what SGLang's experts return."""
        return True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.quant_method = SimpleNamespace(process_weights_after_loading=lambda layer: None)


class UnquantizedLayer(Layer):
    """Layer whose values nothing reads before it is filled."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.quant_method = UnquantizedLinearMethod()


class Model(nn.Module):
    """Model in the form of SGLang's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer("first")
        self.experts = QuantizedLayer("experts")
        self.second = Layer("second")
        self.plain = UnquantizedLayer("plain")
        steps.append(f"build {torch.get_default_dtype()} {self.first.weight.device}")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint."""
        parameters = dict(self.named_parameters())
        for name, value in weights:
            parameters[name].copy_(value)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        """Derive a tensor, before the layers are processed."""
        steps.append(f"post_load_weights {self.first.weight.dtype}")
        self.first.register_buffer("derived", self.first.weight @ self.second.weight.t())


def main(folder: Path) -> None:
    """Build the model with both loaders."""
    folder.mkdir()
    shapes = {name: value.shape for name, value in Model().named_parameters()}
    weights = {name: torch.rand(shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")  # without a file, `load` would not call the loader
    loader.DefaultModelLoader._get_all_weights = lambda *args: iter(weights.items())
    vars(loader)["_initialize_model"] = lambda *args, **kwargs: Model()
    vars(loader)["_get_quantization_config"] = lambda *args, **kwargs: None
    vars(compat)["reserve_rotary_tables"] = lambda *args: None
    vars(identity)["model_class"] = lambda config: Model
    config = SimpleNamespace(
        dtype=torch.float32, model_path=str(folder), quantization=None, revision=None, hf_config=SimpleNamespace()
    )
    engine = SglangEngine(LoadConfig(), config, DeviceConfig("cpu", 0), forkable_methods=("Method",))
    logged = {}
    layouts = {}
    undefined: list[str] = []
    for name in ("load", "empty"):
        steps.clear()
        model = getattr(engine, name)()
        layouts[name] = capture(model).layout
        logged[name] = list(steps)
        undefined = [key for key, value in model.named_parameters() if value.isnan().any()]
    difference = layouts["empty"].first_difference(layouts["load"])
    result = {"difference": difference, "empty": logged["empty"], "loaded": logged["load"], "undefined": undefined}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
