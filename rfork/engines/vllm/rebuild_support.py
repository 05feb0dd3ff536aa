"""Quantisation methods of vLLM whose kernels can be rebuilt from forked weights. Does not import vLLM.

Rebuilding means `process_weights_after_loading` under vLLM's `weights_already_processed`. A method is listed
if vLLM's source shows that this changes no tensor and does everything loading does. NVFP4 and MXFP4 experts
are not listed: all backends but one raise, and that one creates new tensors or skips a step.
"""

from __future__ import annotations

from typing import Final

STEP: Final = "process_weights_after_loading"
REBUILDABLE: Final = frozenset(
    f"vllm.model_executor.layers.{name}"
    for name in (
        "linear.UnquantizedLinearMethod",
        "vocab_parallel_embedding.UnquantizedEmbeddingMethod",
        "fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod",
        "quantization.fp8.Fp8LinearMethod",
        "quantization.fp8.Fp8MoEMethod",
        "quantization.kv_cache.BaseKVCacheMethod",
    )
)
"""Classes that define the rebuild step."""
WITHOUT_STEP: Final = "vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase"


def can_be_rebuilt(method: object) -> bool:
    """Return True if the method has no rebuild step, or the class that defines the step is listed."""
    for base_class in type(method).__mro__:
        if STEP in vars(base_class):
            name = f"{base_class.__module__}.{base_class.__qualname__}"
            return name in REBUILDABLE or name == WITHOUT_STEP
    return True
