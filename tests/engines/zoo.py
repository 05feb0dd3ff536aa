"""Tiny random models of many architectures, and the results of forking them through each engine.

``python -m tests.engines.zoo FOLDER NAME…`` writes models (all without names); it needs only transformers and torch,
so that each engine's own Python can write what its version of transformers knows. Prompts are token ids; models that
do not only generate text have a tokenizer or a processor (`tests.engines.zoo_processors`).

`tests.engines.vllm_zoo`, `sglang_zoo` and `transformers_zoo` fork them; ``python -m tests.engines.zoo record ENGINE``
reads their output and writes it to docs/model-zoo.json.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import load_file, save_file

from tests.engines.zoo_processors import IMAGE_TOKEN, PROCESSORS, write_processor

Task = Literal["generate", "embed", "transcribe"]

RESULTS: Final = Path(__file__).parents[2] / "docs" / "model-zoo.json"
VOCABULARY: Final = 512
PROMPTS: Final = tuple([1 + (17 * prompt + 5 * position) % 500 for position in range(9)] for prompt in range(4))
"""Token ids of four prompts."""
TOKENS: Final = 8
DENSE: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
WIDE: Final[Mapping[str, Any]] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Sizes of quantised layers."""
EXPERTS: Final[Mapping[str, Any]] = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA: Final[Mapping[str, Any]] = {
    **DENSE,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
ROUTED: Final[Mapping[str, Any]] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Router of DeepSeek-V3's experts, as its checkpoints describe it."""
ENCODER: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
VISION: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN2_VL: Final[Mapping[str, Any]] = {
    "text_config": {**DENSE, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": 128},
    **{"image_token_id": IMAGE_TOKEN, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6},
}
"""Special tokens as in `tests.engines.zoo_processors`."""


Quantise = Callable[[torch.Tensor | None], Mapping[str, Any]]


def gptq(weight: torch.Tensor | None) -> Mapping[str, Any]:
    """Return 4-bit tensors in GPTQ's format, in groups of 128 inputs."""
    if weight is None:
        return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    outputs, inputs = weight.shape
    return {
        "qweight": torch.randint(-(2**31), 2**31 - 1, (inputs // 8, outputs), dtype=torch.int32),
        "qzeros": torch.full((inputs // 128, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.rand(inputs // 128, outputs).to(torch.bfloat16) * 0.02,
        "g_idx": torch.arange(inputs, dtype=torch.int32) // 128,
    }


def fp8_block(weight: torch.Tensor | None) -> Mapping[str, Any]:
    """Return 8-bit floats with one scale per block of 128 by 128, as DeepSeek-V3's."""
    if weight is None:
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    outputs, inputs = weight.shape
    scales = torch.rand(-(-outputs // 128), -(-inputs // 128)) * 0.02
    return {"weight": torch.randn_like(weight).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


class Architecture:
    """One architecture: transformers' model type, arguments of its configuration, and what it is used for."""

    def __init__(
        self,
        model_type: str,
        arguments: Mapping[str, Any] = DENSE,
        task: Task = "generate",
        quantise: Quantise | None = None,
        dtype: str = "float32",
        vllm: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """`quantise` replaces a layer's weight by random quantised ones, and ``None`` by the configuration.

        `vllm` are more arguments of vLLM's `LLM`.
        """
        self.model_type = model_type
        self.arguments = {**arguments, **more}
        self.task: Task = task
        self.quantise = quantise
        self.dtype = dtype if quantise is None else "bfloat16"
        """Data type in which an engine computes: some kernels have no other."""
        self.vllm = vllm or {}

    @property
    def needs_processor(self) -> bool:
        """Return True if an engine computes nothing without the model's tokenizer or processor."""
        return self.task != "generate" or self.model_type in PROCESSORS


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama"),
    "llama-tied": Architecture("llama", tie_word_embeddings=True),
    "llama-gptq": Architecture("llama", DENSE, quantise=gptq, **WIDE),
    "llama-fp8": Architecture("llama", DENSE, quantise=fp8_block, **WIDE),
    "mixtral-fp8": Architecture(
        "mixtral", DENSE, quantise=fp8_block, num_local_experts=4, num_experts_per_tok=2, **WIDE
    ),
    "mistral": Architecture("mistral"),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "phi3": Architecture("phi3"),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", query_pre_attn_scalar=32),
    "gemma3": Architecture("gemma3_text", query_pre_attn_scalar=32),
    "glm": Architecture("glm"),
    "glm4": Architecture("glm4"),
    "granite": Architecture("granite"),
    "olmo": Architecture("olmo"),
    "olmo2": Architecture("olmo2"),
    "starcoder2": Architecture("starcoder2"),
    "stablelm": Architecture("stablelm"),
    "cohere": Architecture("cohere"),
    "smollm3": Architecture("smollm3"),
    "exaone4": Architecture("exaone4"),
    "nemotron": Architecture("nemotron"),
    "ernie4_5": Architecture("ernie4_5"),
    "hunyuan": Architecture("hunyuan_v1_dense"),
    "gpt2": Architecture("gpt2", n_embd=128, n_layer=2, n_head=4, n_positions=256),
    "gpt_neox": Architecture("gpt_neox"),
    "opt": Architecture("opt", ffn_dim=256, word_embed_proj_dim=128),
    "bloom": Architecture("bloom", n_layer=2, n_head=4),
    "qwen2_moe": Architecture("qwen2_moe", EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_moe": Architecture("qwen3_moe", EXPERTS),
    "mixtral": Architecture("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "olmoe": Architecture("olmoe", EXPERTS),
    "granitemoe": Architecture("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": Architecture("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=64),
    "deepseek_v2": Architecture("deepseek_v2", MLA, dtype="bfloat16", topk_method="greedy"),
    "deepseek_v3": Architecture("deepseek_v3", MLA, dtype="bfloat16", head_dim=64, **ROUTED),
    "deepseek_v3-cpu_mla": Architecture(
        "deepseek_v3", MLA, head_dim=64, **ROUTED, vllm={"attention_backend": "CPU_MLA"}
    ),
    "deepseek_v3-fp8": Architecture(
        "deepseek_v3", MLA, quantise=fp8_block, **{**ROUTED, **WIDE, "q_lora_rank": 128, "moe_intermediate_size": 128}
    ),
    "glm4_moe": Architecture("glm4_moe", MLA),
    "mamba": Architecture("mamba", hidden_size=128, state_size=16),
    "mamba2": Architecture("mamba2", num_heads=8, head_dim=32, hidden_size=128, state_size=16, n_groups=1),
    "falcon_h1": Architecture("falcon_h1", mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16),
    "bamba": Architecture(
        "bamba", mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, mamba_expand=2, attn_layer_indices=[1]
    ),
    "lfm2": Architecture("lfm2", layer_types=["conv", "full_attention"]),
    "qwen3_next": Architecture(
        "qwen3_next",
        EXPERTS,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        dtype="bfloat16",
    ),
    "bert": Architecture("bert", ENCODER, "embed"),
    "roberta": Architecture("roberta", ENCODER, "embed", max_position_embeddings=258),
    "modernbert": Architecture("modernbert", ENCODER, "embed"),
    "nomic_bert": Architecture("nomic_bert", ENCODER, "embed"),
    "qwen2-embedding": Architecture("qwen2", DENSE, "embed"),
    "llava": Architecture(
        "llava",
        {
            "text_config": {"model_type": "llama", **DENSE},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_index": IMAGE_TOKEN,
        },
    ),
    "qwen2_vl": Architecture("qwen2_vl", QWEN2_VL),
    "qwen2_vl-text": Architecture("qwen2_vl", QWEN2_VL, vllm={"limit_mm_per_prompt": {"image": 0, "video": 0}}),
    "qwen2_5_vl": Architecture(
        "qwen2_5_vl",
        QWEN2_VL,
        vision_config={
            **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128},
            **{"fullatt_block_indexes": [1], "window_size": 28},
        },
    ),
    "whisper": Architecture(
        "whisper",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_target_positions": 128,
            **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1},
        },
        "transcribe",
        vllm={"max_num_batched_tokens": 2048},
    ),
}
"""Architectures by name."""


def model_of(architecture: Architecture) -> Any:
    """Return a random float32 model."""
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture.model_type, **architecture.arguments)
    if architecture.task == "embed":
        build: Any = AutoModel
    elif architecture.task == "transcribe":
        build = transformers.AutoModelForSpeechSeq2Seq
    elif architecture.model_type in PROCESSORS:
        build = transformers.AutoModelForImageTextToText
    else:
        build = AutoModelForCausalLM
    torch.manual_seed(0)
    return build.from_config(config).to(torch.float32)


def write(folder: Path, name: str, models: Mapping[str, Architecture] = ARCHITECTURES) -> Path:
    """Write a model with its weights into a subfolder, which is returned."""
    made, architecture = folder / name, models[name]
    model_of(architecture).save_pretrained(made)
    if architecture.model_type == "llava":
        _rename(made / "model.safetensors", "vision_tower.", "vision_tower.vision_model.")  # as in older checkpoints
    if architecture.needs_processor:
        with contextlib.suppress(ImportError):  # without torchvision, which only engines that read images need
            write_processor(made, architecture.model_type)
    if architecture.quantise is not None:
        _quantise(made, architecture.quantise)
    return made


def _rename(file: Path, old: str, new: str) -> None:
    """Replace a prefix of names of tensors."""
    tensors = {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def _quantise(folder: Path, quantise: Quantise) -> None:
    """Replace the weights of all linear layers but the head."""
    file, config_file = folder / "model.safetensors", folder / "config.json"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        layer = name.removesuffix(".weight")
        if layer != name and tensor.dim() == 2 and not any(part in name for part in ("embed", "lm_head", ".gate.")):
            tensors |= {f"{layer}.{key}": value for key, value in quantise(tensor).items()}
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads(config_file.read_text())
    config |= {"quantization_config": quantise(None), "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    config_file.write_text(json.dumps(config))


def write_all(folder: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """Write models; yield each name with the error if transformers cannot build it."""
    for name in names:
        try:
            write(folder, name)
            yield name, ""
        except Exception as error:  # transformers raises anything for configurations that it does not know
            yield name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def record(engine: str, lines: Iterable[str]) -> None:
    """Write the results of one engine, lines of JSON, into the table of the documentation. Others are kept."""
    table: dict[str, dict[str, dict[str, str]]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for line in lines:
        if line.startswith("{"):
            result = json.loads(line)
            table.setdefault(result["architecture"], {})[engine] = {"level": result["level"], "note": result["note"]}
    ordered = {name: table[name] for name in ARCHITECTURES if name in table}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


def main() -> int:
    """Write the models and print errors as JSON, or record results."""
    if sys.argv[1] == "record":
        record(sys.argv[2], sys.stdin)
        return 0
    for name, error in write_all(Path(sys.argv[1]), sys.argv[2:] or list(ARCHITECTURES)):
        print(json.dumps({"architecture": name, "error": error}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
