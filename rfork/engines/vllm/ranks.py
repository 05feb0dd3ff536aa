"""Model and rank that a vLLM worker loads, and the facts that must be equal on both sides of a fork.

Runs in a worker, after its process groups are created.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any, Final

import torch
from vllm import __version__, envs
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import parallel_state

from rfork.engines.load_or_fork import ModelIdentity
from rfork.engines.vllm.compat import HELPER_ATTRIBUTES, NON_WEIGHT_PATTERNS, configuration, kernels, loads_from
from rfork.engines.vllm.model_name import model_name
from rfork.schema import Rank
from rfork.settings import InstanceSettings

PACKAGES: Final = ("vllm",)


def identity_of(vllm_config: VllmConfig, model_config: ModelConfig, settings: InstanceSettings) -> ModelIdentity:
    """Return the identity of the model that this worker loads."""
    draft = is_draft(vllm_config, model_config)
    files, revision = loads_from(model_config)
    return ModelIdentity(
        model=model_name(model_config.model, settings.model, draft),
        rank=rank_of(vllm_config, model_config, draft),
        facts=facts_of(vllm_config, model_config),
        packages=PACKAGES,
        helper_attributes=HELPER_ATTRIBUTES,
        exclude=NON_WEIGHT_PATTERNS,
        files=files,
        revision=revision,
    )


def is_draft(vllm_config: VllmConfig, model_config: ModelConfig) -> bool:
    """Return True if the model is the server's speculative draft."""
    speculative = vllm_config.speculative_config
    return speculative is not None and model_config is speculative.draft_model_config


def rank_of(vllm_config: VllmConfig, model_config: ModelConfig, draft: bool) -> Rank:
    """Return this worker's coordinates, from vLLM's process groups.

    With and without expert parallelism, experts are split over vLLM's expert group: all tensor ranks of all
    data-parallel ranks.
    """
    tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    experts = parallel_state.get_ep_group() if model_config.is_moe else None
    return Rank(
        tp=tensor.rank_in_group,
        tp_size=tensor.world_size,
        pp=pipeline.rank_in_group,
        pp_size=pipeline.world_size,
        ep=experts.rank_in_group if experts is not None else 0,
        ep_size=experts.world_size if experts is not None else 1,
        dp=vllm_config.parallel_config.data_parallel_index,
        role="speculative" if draft else "main",
    )


def facts_of(vllm_config: VllmConfig, model_config: ModelConfig) -> tuple[str, ...]:
    """Return the facts besides shapes that define the meaning of a model's bytes; see `rfork.image.layout`."""
    parallel = vllm_config.parallel_config
    facts = [
        f"engine vllm {__version__.partition('+')[0]}",
        f"device {device_type(vllm_config)}",
        f"dtype {str(model_config.dtype).removeprefix('torch.')}",
        f"quantisation {quantisation(model_config)}",
        f"kv_cache {vllm_config.cache_config.cache_dtype}",
        f"config {configuration(model_config)}",
    ]
    if model_config.quantization is not None or model_config.is_moe:
        facts.append(f"kernels {kernels(vllm_config, envs)}")
    if model_config.is_moe:
        expert = "expert" if parallel.enable_expert_parallel else "tensor"
        facts.append(f"experts {expert} parallel, {parallel.expert_placement_strategy}")
    return tuple(facts)


def device_type(vllm_config: VllmConfig) -> str:
    """Return ``cpu``, or the GPU architecture, such as ``sm_90``."""
    device = torch.device(vllm_config.device_config.device)
    if device.type != "cuda":
        return str(device.type)
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "gcnArchName", "")) or f"sm_{properties.major}{properties.minor}"


def quantisation(model_config: ModelConfig) -> str:
    """Return the quantisation method and a digest of its configuration."""
    if model_config.quantization is None:
        return "none"
    facts: list[Any] = [
        getattr(model_config.hf_config, "quantization_config", None),
        getattr(model_config, "quantization_config", None),
    ]
    digest = sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:12]
    return f"{model_config.quantization} {digest}"
