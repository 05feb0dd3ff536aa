"""Small models with one quantisation configuration each, for golden checks of an engine's methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

TOKENS: Final = 7
"""Rows of a layer's inputs."""
Results = Callable[[Mapping[str, object]], Iterable[Mapping[str, object]]]
"""Builds a model of a configuration; yields ``{"method", "layer", "failure"}`` for each method."""


def _weights(bits: int, number: str, strategy: str, **options: object) -> dict[str, object]:
    return {"num_bits": bits, "type": number, "strategy": strategy, "symmetric": True, "dynamic": False, **options}


def _compressed(format_name: str, weights: object, inputs: object = None) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


CONFIGURATIONS: Final[Mapping[str, Mapping[str, object] | None]] = {
    "none": None,
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-static": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "compressed-fp8": _compressed(
        "float-quantized", _weights(8, "float", "channel"), _weights(8, "float", "token", dynamic=True)
    ),
    "compressed-int8": _compressed(
        "int-quantized", _weights(8, "int", "channel"), _weights(8, "int", "token", dynamic=True)
    ),
    "compressed-w4a16": _compressed("pack-quantized", _weights(4, "int", "group", group_size=128)),
    "compressed-nvfp4": _compressed(
        "nvfp4-pack-quantized",
        _weights(4, "float", "tensor_group", group_size=16),
        _weights(4, "float", "tensor_group", group_size=16, dynamic="local"),
    ),
    "modelopt-fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "mxfp4": {"quant_method": "mxfp4"},
}
"""Quantisation configurations of checkpoints, by name; ``NAME+experts`` has a layer of experts, too."""

SIZES: Final = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
EXPERTS: Final = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}


MLA: Final = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
}
"""Multi-head latent attention, whose projections engines derive from one weight."""


def model_configuration(
    quantisation: Mapping[str, object] | None, *, experts: bool, mla: bool = False
) -> dict[str, object]:
    """Return the configuration of a model with one layer, and optionally with experts or MLA."""
    architecture = "Mixtral" if experts else "Llama"
    found: dict[str, object] = {"architectures": [f"{architecture}ForCausalLM"], "model_type": architecture.lower()}
    found |= SIZES | (EXPERTS if experts else {}) | (MLA if mla else {})
    return found | ({"quantization_config": dict(quantisation)} if quantisation is not None else {})


def configurations_of(argument: str) -> Iterator[Mapping[str, object]]:
    """Yield configurations of ``NAME`` with options such as ``NAME+mla`` or ``NAME+experts+float32``, or a folder."""
    name, *options = argument.split("+")
    if name in CONFIGURATIONS:
        found = model_configuration(CONFIGURATIONS[name], experts="experts" in options, mla="mla" in options)
        yield found | ({"torch_dtype": "float32"} if "float32" in options else {})
        return
    config = json.loads((Path(argument) / "config.json").read_text())
    quantisation = config.get("quantization_config", config.get("text_config", {}).get("quantization_config"))
    has_experts = any("expert" in key for key in config)
    yield model_configuration(quantisation, experts=has_experts)


def main(results: Results, argument: str) -> int:
    """Print the results of one configuration as lines of JSON."""
    for configuration in configurations_of(argument):
        for result in results(configuration):
            print(json.dumps(result), flush=True)
    return 0
