"""Quantisation methods of SGLang whose layers can be forked, and their golden check.

``python -m rfork.engines.sglang.methods NAME`` (or ``FOLDER``, of a model) builds a small model with one
quantisation configuration and prints one JSON object per method: ``{"method", "layer", "failure"}``. Runs in an
environment with SGLang, in a process of its own, because a kernel that is not made for the device may crash.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from rfork.engines.golden_check import Capturing, GoldenLayer, failure_of
from rfork.engines.golden_models import TOKENS, main
from rfork.engines.layer_methods import STEP, ForkableMethods, dotted_name, method_name
from rfork.engines.sglang import compat

LAYERS: Final = "sglang.srt.layers.quantization"
METHODS: Final = ForkableMethods(
    base=(f"{LAYERS}.base_config.QuantizeMethodBase",),
    read=(
        f"{LAYERS}.unquant.UnquantizedLinearMethod",
        f"{LAYERS}.unquant.UnquantizedEmbeddingMethod",
        f"{LAYERS}.unquant.UnquantizedFusedMoEMethod",
        f"{LAYERS}.kv_cache.BaseKVCacheMethod",
        f"{LAYERS}.fp8.Fp8LinearMethod",
        f"{LAYERS}.fp8.Fp8MoEMethod",
    ),
    command="rfork doctor --engine sglang",
)


RELOCATED: Final = frozenset(
    f"{LAYERS}.unquant.{name}"
    for name in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
)
"""Dotted names of methods whose post-processing moves weights, and does not read their values."""


EXPERTS: Final = f"{LAYERS}.unquant.UnquantizedFusedMoEMethod"


def changing_method(layer: nn.Module, device_type: str) -> str | None:
    """Return why post-processing may have changed the loaded bytes of a layer; None if it has not.

    Judged by reading SGLang's methods, for CPUs and CUDA: on a CPU with AMX they pack the weights.
    """
    method = getattr(layer, "quant_method", None)
    if method is None:
        return None
    name = method_name(layer)
    if getattr(layer, "use_intel_amx_backend", False):
        return f"{name} packs the weights for AMX"
    if device_type not in ("cpu", "cuda") or dotted_name(type(method)) not in RELOCATED or torch.version.hip:
        return f"{name} may change the weights after loading on {device_type}"
    if dotted_name(type(method)) == EXPERTS:
        for reorders in ("use_flashinfer_trtllm_moe", "w13_swiglu_interleaved"):
            if getattr(method, reorders, False):
                return f"{name} reorders the weights ({reorders})"
    return None


def relocated_weights(module: nn.Module) -> Iterator[str]:
    """Yield the names of the parameters of a model's layers with such methods."""
    for name, layer in module.named_modules():
        if dotted_name(type(getattr(layer, "quant_method", None))) in RELOCATED:
            yield from (f"{name}.{parameter}" for parameter, _ in layer.named_parameters(recurse=False))


FORKABLE_CONFIGURATIONS: Final = frozenset({None, "fp8"})
"""Quantisation configurations all of whose methods are in `METHODS`."""


def unsupported_configuration(quantization: str | None, accepted: Collection[str] = ()) -> str | None:
    """Return why no model with this quantisation can be forked; None if that depends on its layers."""
    if quantization in FORKABLE_CONFIGURATIONS or accepted:
        return None
    return f"quantisation {quantization} has not passed the golden check: `{METHODS.command}` runs it"


def unsupported_method(module: nn.Module, device_type: str, accepted: Collection[str] = ()) -> str | None:
    """Return why a model cannot be forked, judged by the methods of its layers."""
    for name, layer in module.named_modules():
        if reason := METHODS.refusal(layer, device_type, accepted):
            return f"{reason} (at {name or 'the top level'})"
    return None


def golden_layers(module: nn.Module, hf_config: Any, dtype: torch.dtype) -> Iterator[GoldenLayer]:
    """Yield one layer of an unprocessed model for each of its methods."""
    seen: set[tuple[str, str]] = set()
    for layer in module.modules():
        name = method_name(layer)
        key = (type(layer).__name__, name)
        if name and key not in seen:
            seen.add(key)
            yield GoldenLayer(name, layer, process=_process, outputs=partial(_outputs, hf_config, dtype))


def _process(layer: nn.Module) -> None:
    getattr(layer.quant_method, STEP)(layer)


def _outputs(hf_config: Any, dtype: torch.dtype, layer: nn.Module) -> torch.Tensor:
    """Return a layer's outputs for inputs that are always the same."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    method: Any = layer.quant_method
    random = torch.Generator().manual_seed(7)
    device = next((tensor.device for tensor in layer.parameters()), torch.device("cpu"))

    def inputs(size: int) -> torch.Tensor:
        return torch.randn(TOKENS, size, generator=random).to(device, dtype)

    if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
        embedded: torch.Tensor = method.embedding(layer, torch.arange(TOKENS, device=device))
        return embedded
    if isinstance(layer, LinearBase | ParallelLMHead):
        computed: torch.Tensor = method.apply(layer, inputs(_input_size(layer, hf_config)), None)
        return computed
    if hasattr(layer, "k_scale"):
        scales = [getattr(layer, f"{name}_scale{suffix}", None) for name in "kv" for suffix in ("", "_float")]
        return torch.tensor([float(scale) for scale in scales if scale is not None])
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    experts, chosen = hf_config.num_local_experts, hf_config.num_experts_per_tok
    hidden = inputs(hf_config.hidden_size)
    topk = StandardTopKOutput(
        torch.rand(TOKENS, chosen, generator=random).to(device),
        torch.randint(experts, (TOKENS, chosen), generator=random).to(device, torch.int32),
        torch.randn(TOKENS, experts, generator=random).to(device),
    )
    combined: torch.Tensor = method.apply(layer, StandardDispatchOutput(hidden, None, topk)).hidden_states
    return combined


def _input_size(layer: nn.Module, hf_config: Any) -> int:
    return int(getattr(layer, "input_size_per_partition", getattr(layer, "input_size", hf_config.hidden_size)))


def golden_results(configuration: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Build the model and yield a result per method: its name, the layer's class, and the failure if any."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(configuration))
        options: dict[str, Any] = {} if on_gpu else {"attention_backend": "torch_native", "sampling_backend": "pytorch"}
        device_type = "cuda" if on_gpu else "cpu"
        arguments = ServerArgs(model_path=folder, device=device_type, skip_tokenizer_init=True, **options)
        arguments.resolve_once()
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        model_config, device_config = ModelConfig.from_server_args(arguments), DeviceConfig(device_type, 0)
        bootstrap.init_parallel_runtime(server_args=arguments, device=device_type, dist_port=_free_port())
        bootstrap.init_layer_runtime(model_config=model_config)
        quantization = loader._get_quantization_config(model_config, LoadConfig())
        with loader.set_default_torch_dtype(model_config.dtype), torch.device(device_config.device):
            module = loader._initialize_model(model_config, LoadConfig(), quantization)
        capturing = Capturing(("sglang",), compat.HELPER_ATTRIBUTES, compat.SCRATCH)
        for layer in golden_layers(module, model_config.hf_config, model_config.dtype):
            failure = failure_of(layer, capturing)
            yield {"method": layer.name, "layer": type(layer.module).__name__, "failure": failure}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not torch.cuda.is_available():
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.exit(main(golden_results, sys.argv[1]))
