"""What parts one vLLM model's tensors from another's of the same names and shapes, and what is no weight.

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
    # KV caches; rotary tables, which each server computes itself and widens or casts while it serves.
    *("*.kv_cache", "*.kv_cache.*", "*.cos_sin_cache", "*.cos_sin_cache_bf16"),
    # What forwards write and read again: as large as a batch, and other bytes after each step.
    *("*deepstack_input_embeds.*", "*per_layer_embeddings", "*.per_layer_inputs", "*_ds_buffers.*"),
    *("*.positions", "*.hidden_states"),
    *("*topk_indices_buffer", "*candidate_block_buffer", "*mtp_hidden_buffer"),
    # Scratch of kernels, and the buffers of what sends tokens between ranks.
    *("*.workspace", "*workspace_buffer", "*.prepare_finalize.*", "*.dispatcher.*", "*.all2all_manager.*"),
)
"""Patterns of names (of `fnmatch`) of tensors that hang on vLLM's models and are not given."""

PATH_FIELDS: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version", "auto_map", "_commit_hash"})
"""Keys of a configuration that say where it came from, or who wrote it."""
PATHS: Final = ("_path", "_dir", "_file")
"""What keys of paths end in."""

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
"""Options of vLLM's (`vllm.envs`) that choose kernels, which shuffle, pad or requantise weights."""
BACKENDS: Final = ("moe_backend", "linear_backend", "linear_backend_per_quant")
"""The same, of vLLM's configuration of kernels."""


def loads_from(model_config: ModelConfig) -> tuple[str, str | None]:
    """Return the folder, URI or hub id that vLLM loads a model's weights from, and the hub's revision.

    Of a revision that vLLM resolved as it started, the commit: a branch may have moved since. Of a model in
    an object store, vLLM's `model` is a local folder without weights.
    """
    if stored := getattr(model_config, "model_weights", None):
        return str(stored), None
    revision: str | None = model_config.revision
    return str(model_config.model), getattr(revision, "resolved", revision)


def configuration(model_config: ModelConfig) -> str:
    """A digest of the model's configuration as it is in effect, ``--hf-overrides`` and all."""
    return digest(_without_ignored(model_config.hf_config.to_dict()))


def kernels(vllm_config: VllmConfig, environment: object) -> str:
    """A digest of what is chosen among kernels that keep weights each their own way.

    `environment`: the module `vllm.envs`, or what has its names; one that it does not know is left out.
    """
    chosen = vllm_config.kernel_config
    choices = {name: getattr(environment, name, None) for name in LAYOUT_CHOICES}
    return digest({**choices, **{name: getattr(chosen, name, None) for name in BACKENDS}})


def digest(value: object) -> str:
    """Twelve digits, the same in every process: of what JSON does not know only the type counts."""
    written = json.dumps(value, sort_keys=True, default=_named)
    return sha256(written.encode()).hexdigest()[:12]


def _without_ignored(node: object) -> object:
    """Without what says where the configuration lies; keys are text, as JSON sorts no mixture."""
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
