"""vLLM servers that cannot be forked, with the reasons. They load their weights as if rfork were not installed.

A server is rejected if part of what it serves with would be missing from the image, if weights change without
notice, or if a rank that loads alone would wait for the others forever.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.base_loader import _get_online_quantization_config

from rfork.engines.vllm.ranks import is_draft
from rfork.engines.vllm.rebuild_support import can_be_rebuilt

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
    if device == "cpu" and model_config.quantization is not None:
        yield "quantised weights on a CPU are packed into kernel handles, which are not tensors"
    if device == "cpu" and model_config.is_moe:
        yield "expert weights on a CPU are packed for their kernels"
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
    if parallel.world_size_across_dp > 1 and _get_online_quantization_config(vllm_config) is not None:
        yield "online quantisation synchronises scales between ranks: a rank that loads alone would hang"
    if speculative is not None and is_draft(vllm_config, model_config) and speculative.method != "draft_model":
        yield f"a draft model of method {speculative.method} shares tensors with its main model"


def unsupported_model(module: nn.Module) -> str | None:
    """Return why a built model cannot be forked: a kernel keeps data derived from weights elsewhere."""
    for name, submodule in module.named_modules():
        method = getattr(submodule, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not method.supports_pre_processed_weights:
            return (
                f"vLLM does not declare that {type(method).__name__} (at {name or 'the top level'}) supports "
                "pre-processed weights"
            )
        if isinstance(method, QuantizeMethodBase) and not can_be_rebuilt(method):
            return (
                f"the kernels of {type(method).__name__} (at {name or 'the top level'}) are not known to be "
                "rebuildable from forked weights"
            )
        weight = getattr(submodule, "weight", None)
        if hasattr(submodule, "cpu_linear") and weight is not None and not weight.numel():
            return f"the weight of {name} was packed into a kernel handle"
    return None


def _is_zen() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_zen_cpu())
