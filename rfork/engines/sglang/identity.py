"""Model and rank that an SGLang scheduler loads, and the models that cannot be forked.

SGLang loads those itself and they are not seeds.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rfork.engines import weight_cache
from rfork.engines.arguments import canonical_model_name
from rfork.engines.load_or_fork import ModelIdentity
from rfork.engines.sglang import compat
from rfork.engines.sglang.draft_tensors import ALGORITHMS, SglangTensorSharing
from rfork.engines.shared_tensors import main_model
from rfork.schema import Rank
from rfork.settings import InstanceSettings

if TYPE_CHECKING:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig


def unsupported_config(model_config: ModelConfig) -> str | None:
    """Return why this model cannot be forked with the resolved server arguments, or None if it can."""
    from sglang.srt.runtime_context import get_parallel

    daemon = weight_cache.holder_id() is not None
    if reason := compat.unsupported_option(ignored={"weight_cache_mode"} if daemon else ()):
        return reason
    if reason := unsupported_parallelism(get_parallel(), compat.option("dp_size", 1)):
        return reason
    if not model_config.is_draft_model:
        return None
    return unsupported_draft(compat.option("speculative_algorithm"), get_parallel().pp_size, main_model())


def unsupported_parallelism(parallel: Any, dp_size: int) -> str | None:
    """Return why the ranks of a server of this parallelism have no distinct names, or None if they have."""
    if dp_size > 1 and parallel.attn_dp_size == 1 and not hasattr(parallel, "dp_rank"):
        return f"data parallelism without --enable-dp-attention cannot be forked with SGLang {version('sglang')}"
    return None


def unsupported_draft(algorithm: str | None, pp_size: int, main: nn.Module | None) -> str | None:
    """Return why a draft of this algorithm cannot be forked; None if it can."""
    name = (algorithm or "an unnamed algorithm").upper()
    if name == STANDALONE:
        return None
    if name not in ALGORITHMS:
        return f"which tensors a draft model for {name} shares with its main model is unknown"
    if pp_size > 1:
        return "with pipeline stages, which tensors a draft model shares with its main model is unknown"
    if main is None:
        return "the main model of this draft was not forked, so it may have other tensors than on the source"
    if not hasattr(main, "get_embed_and_head"):
        return f"which tensors {type(main).__name__} shares with its draft is unknown"
    return None


def sharing_of(model_config: ModelConfig) -> SglangTensorSharing | None:
    """Return which tensors the model shares with its main model; None for a model that shares none."""
    if not model_config.is_draft_model:
        return None
    algorithm, main = (compat.option("speculative_algorithm", None) or STANDALONE).upper(), main_model()
    return SglangTensorSharing(main, algorithm) if main is not None and algorithm != STANDALONE else None


def unsupported_model(module: nn.Module) -> str | None:
    """Return why a built model cannot be forked: `load_weights` would set more than its tensors."""
    for submodule in module.modules():
        if reason := unsupported_class(type(submodule)):
            return reason
    return None


def unsupported_class(model: type) -> str | None:
    """Return why models of this class cannot be forked, as far as the class shows it before a model is built."""
    for base_class in model.__mro__:
        if extra_state := compat.SET_BY_WEIGHTS.get(base_class.__name__):
            return f"loading the weights of {base_class.__name__} sets more than tensors: {extra_state}"
    return None


PACKAGES = ("sglang",)
STANDALONE = "STANDALONE"
"""Algorithm whose draft is a complete model."""


def identity_of(
    model_config: ModelConfig,
    load_config: LoadConfig,
    device_config: DeviceConfig,
    settings: InstanceSettings,
) -> ModelIdentity:
    """Return the identity of this process's model: name, rank, and facts that must be equal on both sides of a fork."""
    path, revision = str(model_config.model_path), getattr(model_config, "revision", None)
    served = None if model_config.is_draft_model else compat.option("served_model_name")
    if served == compat.option("model_path"):
        served = None
    name = settings.model or served or canonical_model_name(path)
    if (draft_index := load_config.draft_model_idx) is not None:
        name = f"{name}#{draft_index}"  # several drafts in one process, one per layer
    return ModelIdentity(
        name,
        _rank(draft=model_config.is_draft_model),
        _facts(model_config, device_config),
        PACKAGES,
        compat.HELPER_ATTRIBUTES,
        compat.SCRATCH,
        path,
        revision,
        sharing_of(model_config),
    )


def _rank(*, draft: bool) -> Rank:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return Rank(
        tp=parallel.tp_rank,
        tp_size=parallel.tp_size,
        pp=parallel.pp_rank,
        pp_size=parallel.pp_size,
        ep=parallel.moe_ep_rank,
        ep_size=parallel.moe_ep_size,
        dp=(parallel.attn_dp_rank if parallel.attn_dp_size > 1 else getattr(parallel, "dp_rank", None)) or 0,
        role="speculative" if draft else "main",
    )


def _facts(model_config: ModelConfig, device_config: DeviceConfig) -> tuple[str, ...]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return (
        f"engine sglang {version('sglang')}",
        f"model {model_class(model_config).__name__}",
        f"device {_device(torch.device(device_config.device))}",
        f"dtype {str(model_config.dtype).removeprefix('torch.')}",
        f"quantization {model_config.quantization or 'none'}",
        f"parallel attention tp {parallel.attn_tp_size} cp {parallel.attn_cp_size}, experts dp {parallel.moe_dp_size}",
        f"experts {compat.option('init_expert_location')}, {compat.option('ep_num_redundant_experts')} redundant, "
        f"by {compat.option('moe_runner_backend')}",
        f"attention {compat.option('attention_backend')}",
        *compat.facts(model_config),
    )


def model_class(model_config: ModelConfig) -> type:
    """Return the class that implements the model in SGLang."""
    from sglang.srt.model_loader.utils import get_model_architecture

    found: type = get_model_architecture(model_config)[0]
    return found


def _device(device: torch.device) -> str:
    """Return the device type, which determines kernels and their layouts."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{'rocm' if torch.version.hip else 'cuda'} {major}.{minor}"
