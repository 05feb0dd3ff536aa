"""Facts that distinguish vLLM models of equal names and shapes, and patterns of non-weight tensors.

Nothing here imports vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

NON_WEIGHT_PATTERNS: Final = (
    # KV caches, and rotary tables, which each server computes itself and widens or casts while serving.
    *("*.kv_cache", "*.kv_cache.*", "*.cos_sin_cache", "*.cos_sin_cache_bf16"),
    # Batch-sized scratch tensors, overwritten by each forward pass.
    *("*deepstack_input_embeds.*", "*per_layer_embeddings", "*.per_layer_inputs", "*_ds_buffers.*"),
    *("*.positions", "*.hidden_states"),
    *("*topk_indices_buffer", "*candidate_block_buffer", "*mtp_hidden_buffer"),
    # Scratch of kernels, and communication buffers.
    *("*.workspace", "*workspace_buffer", "*.prepare_finalize.*", "*.dispatcher.*", "*.all2all_manager.*"),
)
"""`fnmatch` name patterns of tensors that belong to vLLM's models but are not served."""

HELPER_ATTRIBUTES: Final = (
    # Linear layers; method, kernel, implementation, experts and scales of MoE layers.
    *("fp8_linear", "fp8_kernel", "linear_kernel", "moe_kernel", "moe_quant_config"),
    *("fused_experts", "_fused_experts", "fallback_experts", "_prepared_experts", "fused_moe_impl"),
    *("_a1", "_a2", "_w1", "_w2"),
)
"""Attributes of vLLM's layers that refer to the code computing with the weights."""

PATH_FIELDS: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version", "auto_map", "_commit_hash"})
"""Configuration keys that state where a configuration came from or what wrote it."""
PATHS: Final = ("_path", "_dir", "_file")
"""Suffixes of configuration keys that contain paths."""

LAYOUT_CHOICES: Final = (
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_DISABLED_KERNELS",
    "VLLM_ROCM_FP8_PADDING",
    "VLLM_ROCM_MOE_PADDING",
    "VLLM_ROCM_USE_AITER",
    "VLLM_ROCM_USE_AITER_LINEAR",
    "VLLM_ROCM_USE_AITER_MOE",
)
"""Options of `vllm.envs` that select kernels, which shuffle, pad or requantise weights."""
BACKENDS: Final = ("moe_backend", "linear_backend", "linear_backend_per_quant")
"""The same in vLLM's kernel configuration."""


def loads_from(model_config: ModelConfig) -> tuple[str, str | None]:
    """Return the folder, URI or hub id that vLLM loads a model's weights from, and the hub revision.

    If vLLM has resolved the revision, this is the commit, because a branch may have moved since. For a model
    in an object store, vLLM's `model` is a local folder without weights.
    """
    if stored := getattr(model_config, "model_weights", None):
        return str(stored), None
    revision: str | None = model_config.revision
    return str(model_config.model), getattr(revision, "resolved", revision)


def configuration(model_config: ModelConfig) -> str:
    """Return a digest of the model's effective configuration, including ``--hf-overrides``."""
    return digest(_without_ignored(model_config.hf_config.to_dict()))


def kernels(vllm_config: VllmConfig, environment: object) -> str:
    """Return a digest of the options that select kernels with different weight layouts.

    `environment` is the module `vllm.envs`, or an object with its names; unknown names are skipped.
    """
    chosen = vllm_config.kernel_config
    choices = {name: getattr(environment, name, None) for name in LAYOUT_CHOICES}
    return digest({**choices, **{name: getattr(chosen, name, None) for name in BACKENDS}})


def digest(value: object) -> str:
    """Return twelve hexadecimal digits, equal in every process. Values unknown to JSON are reduced to their type."""
    written = json.dumps(value, sort_keys=True, default=_named)
    return sha256(written.encode()).hexdigest()[:12]


def _without_ignored(node: object) -> object:
    """Return the configuration without source locations, and with string keys, because JSON cannot sort mixed keys."""
    if isinstance(node, Mapping):
        return {
            str(key): _without_ignored(value)
            for key, value in node.items()
            if str(key) not in PATH_FIELDS and not str(key).endswith(PATHS)
        }
    if isinstance(node, list | tuple):
        return [_without_ignored(item) for item in node]
    return node


def _named(value: object) -> str:
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__
