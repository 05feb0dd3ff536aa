"""Quantisation methods of vLLM whose layers can be forked, and their golden check.

``python -m rfork.engines.vllm.methods NAME`` (or ``FOLDER``, of a model) builds a small model with one
quantisation configuration and prints one JSON object per method: ``{"method", "layer", "failure"}``. Runs in an
environment with vLLM, in a process of its own, because a kernel that is not made for the device may crash.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from torch import nn

from rfork.engines.golden_check import Capturing, GoldenLayer, failure_of
from rfork.engines.golden_models import TOKENS, main
from rfork.engines.layer_methods import STEP, ForkableMethods, dotted_name, method_name, step_owner
from rfork.engines.vllm import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MLA: Final = "MLAAttention"
"""Class of vLLM's multi-head latent attention, which derives tensors from the weight of one of its layers."""
LAYERS: Final = "vllm.model_executor.layers"
METHODS: Final = ForkableMethods(
    base=(f"{LAYERS}.quantization.base_config.QuantizeMethodBase",),
    read=(
        f"{LAYERS}.linear.UnquantizedLinearMethod",
        f"{LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod",
        f"{LAYERS}.quantization.kv_cache.BaseKVCacheMethod",
    ),
    proven={
        "cpu": (
            "AutoAWQMarlinLinearMethod/CPUWNA16LinearKernel",
            "AutoAWQMoEMethod/CPUExpertsInt4",
            "AutoGPTQLinearMethod/CPUWNA16LinearKernel",
            "AutoGPTQMoEMethod/CPUExpertsInt4",
            "CompressedTensorsLinearMethod/CompressedTensorsW8A8Fp8/ChannelWiseTorchFP8ScaledMMLinearKernel",
            "CompressedTensorsLinearMethod/CompressedTensorsW8A8Int8/CPUInt8ScaledMMLinearKernel",
            "CompressedTensorsLinearMethod/CompressedTensorsWNA16/CPUWNA16LinearKernel",
            "CompressedTensorsW8A8Int8MoEMethod/CPUExpertsInt8",
            "CompressedTensorsWNA16MoEMethod/CPUExpertsInt4",
            "Fp8LinearMethod/CPUFp8BlockScaledMMKernel",
            "Fp8MoEMethod/CPUExpertsFp8",
            "UnquantizedFusedMoEMethod/CPUUnquantizedExperts",
            "UnquantizedFusedMoEMethod/X86CPUUnquantizedExperts",
        ),
    },
    command="rfork doctor --engine vllm",
)
REBUILT: Final = (
    f"{LAYERS}.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod",
    f"{LAYERS}.quantization.fp8.Fp8LinearMethod",
    f"{LAYERS}.quantization.fp8.Fp8MoEMethod",
)
"""Classes whose post-processing rebuilds a kernel on a GPU from weights that are already processed, where vLLM
declares so. Judged by reading them.
"""


KEEPING: Final = frozenset(
    {
        f"{LAYERS}.linear.UnquantizedLinearMethod",
        f"{LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod",
        f"{LAYERS}.fused_moe.router.gate_linear._GateLinearMethod",
    }
)
"""Classes whose post-processing leaves the bytes of a layer's tensors unchanged, or replaces the tensors by others of
another shape. Judged by reading them, for CPUs and CUDA.
"""
EXPERTS: Final = f"{LAYERS}.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod"
KEEPING_EXPERTS: Final = frozenset({"TRITON", "BATCHED_TRITON"})
"""Backends of unquantised experts that compute with the tensors as they were loaded; others reorder them."""


ATTENTION: Final = frozenset(
    {
        f"{LAYERS}.attention.attention.Attention",
        f"{LAYERS}.attention.mla_attention.MLAAttention",
        f"{LAYERS}.attention.mm_encoder_attention.MMEncoderAttention",
    }
)
"""Classes of attention whose post-processing derives tensors from loaded ones, and at most removes one of these."""


def changing_method(layer: nn.Module, device_type: str) -> str | None:
    """Return why post-processing may have changed the loaded bytes of a layer; None if it has not."""
    method = getattr(layer, "quant_method", None)
    if method is None:
        owner = step_owner(layer)
        if owner is None or dotted_name(owner) in ATTENTION:
            return None
        return f"{type(layer).__name__} post-processes its weights"
    name, known = method_name(layer), dotted_name(type(method))
    if device_type in ("cpu", "cuda") and known in KEEPING:
        weight = getattr(layer, "weight", None)
        if device_type == "cpu" and weight is not None and weight.dim() != 2 and weight.numel():
            return f"{name} may pack convolutions on a CPU"
        return None
    if device_type == "cuda" and known == EXPERTS:
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        return None if backend in KEEPING_EXPERTS else f"{name} reorders the weights for the backend {backend}"
    return f"{name} may change the weights after loading on {device_type}"


def unsupported_method(module: nn.Module, device_type: str, accepted: Collection[str] = ()) -> str | None:
    """Return why a model cannot be forked, judged by the methods of its layers. The model may be unprocessed."""
    for name, layer in module.named_modules():
        if not is_rebuilt(layer, device_type) and (reason := METHODS.refusal(layer, device_type, accepted)):
            return f"{reason} (at {name or 'the top level'})"
    return None


def is_rebuilt(layer: nn.Module, device_type: str) -> bool:
    """Return True if the layer's kernel is rebuilt once its weights have been filled."""
    method = getattr(layer, "quant_method", None)
    owner = step_owner(method) if method is not None else None
    return (
        device_type != "cpu"
        and owner is not None
        and dotted_name(owner) in REBUILT
        and bool(getattr(method, "supports_pre_processed_weights", False))
        and not METHODS.is_proven(method_name(layer), device_type)
    )


def golden_layers(module: nn.Module, vllm_config: VllmConfig) -> Iterator[GoldenLayer]:
    """Yield one layer of an unprocessed model for each of its methods, and for each class of MLA attention."""
    seen: set[tuple[str, str]] = set()
    dtype = vllm_config.model_config.dtype
    for layer in module.modules():
        if type(layer).__name__ == MLA and (MLA, "") not in seen:
            seen.add((MLA, ""))
            name = f"{MLA} with {type(layer.impl).__name__}"
            yield GoldenLayer(
                name, layer, process=partial(_process_mla, dtype), outputs=partial(_mla_outputs, vllm_config)
            )
        name = method_name(layer)
        key = (type(layer).__name__, name)
        if name and key not in seen:
            seen.add(key)
            yield GoldenLayer(
                name, layer, process=_process, outputs=partial(_outputs, vllm_config), rebuild=_rebuild_of(layer)
            )


def _process(layer: nn.Module) -> None:
    getattr(layer.quant_method, STEP)(layer)


def _process_mla(dtype: torch.dtype, layer: nn.Module) -> None:
    attention: Any = layer
    _process(attention.kv_b_proj)
    attention.process_weights_after_loading(dtype)


def _rebuild_of(layer: nn.Module) -> Callable[[nn.Module], None] | None:
    device = next((tensor.device.type for tensor in layer.parameters()), "cpu")
    if not is_rebuilt(layer, device):
        return None

    def rebuild(copied: nn.Module) -> None:
        with compat.weights_already_processed():
            _process(copied)

    return rebuild


def _outputs(vllm_config: VllmConfig, layer: nn.Module) -> torch.Tensor:
    """Return a layer's outputs for inputs that are always the same."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    hf_config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
    method: Any = layer.quant_method
    random = torch.Generator().manual_seed(7)
    device = next((tensor.device for tensor in layer.parameters()), torch.device("cpu"))

    def inputs(size: int) -> torch.Tensor:
        return torch.randn(TOKENS, size, generator=random).to(device, dtype)

    with set_forward_context(None, vllm_config):
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            embedded: torch.Tensor = method.embedding(layer, torch.arange(TOKENS, device=device))
            return embedded
        if isinstance(layer, LinearBase | ParallelLMHead):
            size = getattr(layer, "input_size_per_partition", hf_config.hidden_size)
            computed: torch.Tensor = method.apply(layer, inputs(size), None)
            return computed
        if hasattr(layer, "_k_scale"):
            scales = [getattr(layer, f"_{name}_scale{suffix}", 0.0) for name in "qkv" for suffix in ("", "_float")]
            return torch.tensor([float(scale) for scale in scales])
        return _expert_outputs(method, layer, inputs(hf_config.hidden_size), random, hf_config)


def _mla_outputs(vllm_config: VllmConfig, layer: nn.Module) -> torch.Tensor:
    """Return what MLA computes with weights: queries in latent space, and values projected back from there.

    The attention between them has no weights and is left out.
    """
    from vllm.forward_context import set_forward_context

    attention: Any = layer
    random, dtype = torch.Generator().manual_seed(7), vllm_config.model_config.dtype
    device = next((tensor.device for tensor in layer.parameters()), torch.device("cpu"))

    def inputs(*shape: int) -> torch.Tensor:
        return torch.randn(TOKENS, *shape, generator=random).to(device, dtype)

    latent: list[torch.Tensor] = []

    def attend(query: torch.Tensor | tuple[torch.Tensor, ...], *_: object) -> tuple[torch.Tensor, None]:
        latent.append(torch.cat(query, dim=-1) if isinstance(query, tuple) else query)
        return latent[-1][..., : attention.kv_lora_rank].contiguous(), None

    batch = {"num_decodes": TOKENS, "num_decode_tokens": TOKENS, "num_prefills": 0, "num_actual_tokens": TOKENS}
    head = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    compressed, output = inputs(attention.kv_lora_rank), inputs(attention.num_heads * attention.v_head_dim)
    with set_forward_context(None, vllm_config), patch.object(attention.impl, "forward_mqa", attend):
        attention.forward_impl(
            inputs(attention.num_heads, head),
            compressed,
            inputs(1, attention.qk_rope_head_dim),
            torch.empty(0, device=device),
            SimpleNamespace(**batch, decode=SimpleNamespace(), prefill=None),
            output=output,
        )
        parts = [*latent, output]
        if attention.kv_b_proj.weight.numel():  # prefill computes with it
            parts.append(attention.kv_b_proj(compressed)[0])
    return torch.cat([part.flatten() for part in parts])


def _expert_outputs(
    method: Any, layer: nn.Module, inputs: torch.Tensor, random: torch.Generator, hf_config: Any
) -> torch.Tensor:
    """Return the outputs of a layer of experts, whose functions differ between versions of vLLM."""
    experts, chosen = hf_config.num_local_experts, hf_config.num_experts_per_tok
    values = {
        "layer": layer,
        "x": inputs,
        "router_logits": torch.randn(TOKENS, experts, generator=random).to(inputs),
        "topk_weights": torch.rand(TOKENS, chosen, generator=random).to(inputs.device),
        "topk_ids": torch.randint(experts, (TOKENS, chosen), generator=random).to(inputs.device, torch.int32),
        "shared_experts": None,
        "shared_experts_input": None,
    }
    apply = method.apply_monolithic if getattr(method, "is_monolithic", False) else method.apply
    arguments = {name: values[name] for name in inspect.signature(apply).parameters if name in values}
    outputs = apply(**arguments)
    result: torch.Tensor = outputs[-1] if isinstance(outputs, tuple) else outputs
    return result


def golden_results(configuration: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Build the model and yield a result per method: its name, the layer's class, and the failure if any."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(configuration))
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=128,
            dtype=str(configuration["torch_dtype"]),
        ).create_engine_config()
        device = torch.device(vllm_config.device_config.device)
        if device.type == "cpu":
            compat.keep_weights_on_cpu()
        with set_current_vllm_config(vllm_config):
            backend = "gloo" if device.type == "cpu" else "nccl"
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend)
            initialize_model_parallel(1, 1)
            previous = torch.get_default_dtype()
            torch.set_default_dtype(vllm_config.model_config.dtype)
            try:
                with device:
                    module = initialize_model(vllm_config)
            finally:
                torch.set_default_dtype(previous)
            capturing = Capturing(("vllm",), compat.HELPER_ATTRIBUTES, compat.NON_WEIGHT_PATTERNS)
            for layer in golden_layers(module, vllm_config):
                failure = failure_of(layer, capturing)
                yield {"method": layer.name, "layer": type(layer.module).__name__, "failure": failure}


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(golden_results, sys.argv[1]))
