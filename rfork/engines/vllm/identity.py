"""Model and rank that a vLLM worker loads, the facts that must be equal on both sides of a fork, and the
servers that cannot be forked.

Runs in a worker, after its process groups are created. A server is rejected if part of what it serves with
would be missing from the image, if weights change without notice, or if a rank that loads alone would wait
for the others forever. It loads its weights as if rfork were not installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Final

import torch
from vllm import __version__, envs
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import parallel_state

from rfork.engines.load_or_fork import ModelIdentity
from rfork.engines.shared_tensors import main_model
from rfork.engines.vllm import draft_tensors
from rfork.engines.vllm.compat import (
    HELPER_ATTRIBUTES,
    NON_WEIGHT_PATTERNS,
    configuration,
    is_quantised_online,
    kernels,
    loads_from,
    model_name,
)
from rfork.engines.vllm.draft_tensors import VllmTensorSharing
from rfork.schema import Rank
from rfork.settings import InstanceSettings

OWN_WORKERS = ("vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker")


def unsupported_config(vllm_config: VllmConfig, model_config: ModelConfig) -> str | None:
    """Return why this server cannot be forked, judged by its configuration alone; None if it can."""
    return next(_reasons(vllm_config, model_config), None)


def _reasons(vllm_config: VllmConfig, model_config: ModelConfig) -> Iterator[str]:
    parallel, offload = vllm_config.parallel_config, vllm_config.offload_config
    device = vllm_config.device_config.device_type
    speculative = vllm_config.speculative_config
    if parallel.worker_cls not in OWN_WORKERS:
        yield f"worker class {parallel.worker_cls} is not one of vLLM's: its effect on weights is unknown"
    if device not in ("cpu", "cuda"):
        yield f"weights on a device of type {device} are not supported"
    if device == "cpu" and _is_zen():
        yield "zentorch packs weights on this CPU"
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        yield "offloaded weights move between host and GPU while the server runs"
    if parallel.enable_eplb:
        yield "expert load balancing moves experts while the server runs"
    if parallel.enable_elastic_ep:
        yield "elastic expert parallelism loads and moves experts on its own"
    if parallel.decode_context_parallel_size > 1:
        yield "decode context parallelism gathers derived weights: a rank that loads alone would hang"
    if parallel.world_size_across_dp > 1 and is_quantised_online(vllm_config):
        yield "online quantisation synchronises scales between ranks: a rank that loads alone would hang"
    if shares_tensors(vllm_config, model_config):
        yield from _draft_reasons(speculative, parallel)


def _draft_reasons(speculative: Any, parallel: Any) -> Iterator[str]:
    """Yield why a draft that shares tensors with its main model cannot be forked."""
    architectures = getattr(speculative.draft_model_config.hf_config, "architectures", None) or ()
    if speculative.method not in draft_tensors.METHODS:
        yield f"which tensors a draft model of method {speculative.method} shares with its main model is unknown"
    if others := draft_tensors.OTHER_RULES.intersection(architectures):
        yield f"which tensors {min(others)} shares with its main model is unknown"
    if parallel.pipeline_parallel_size > 1:
        yield "with pipeline stages, which tensors a draft model shares with its main model is unknown"
    if main_model() is None:
        yield "the main model of this draft was not loaded with the load format rfork"


def _is_zen() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_zen_cpu())


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
        sharing=sharing_of(vllm_config, model_config),
    )


def is_draft(vllm_config: VllmConfig, model_config: ModelConfig) -> bool:
    """Return True if the model is the server's speculative draft."""
    speculative = vllm_config.speculative_config
    return speculative is not None and model_config is speculative.draft_model_config


def shares_tensors(vllm_config: VllmConfig, model_config: ModelConfig) -> bool:
    """Return True if the model is a draft that shares tensors with its main model."""
    return is_draft(vllm_config, model_config) and vllm_config.speculative_config.method != "draft_model"


def sharing_of(vllm_config: VllmConfig, model_config: ModelConfig) -> VllmTensorSharing | None:
    """Return which tensors the model shares with its main model; None for a model that shares none."""
    main = main_model()
    return VllmTensorSharing(main) if main is not None and shares_tensors(vllm_config, model_config) else None


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
