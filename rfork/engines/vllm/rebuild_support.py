"""Which quantisation methods of vLLM can rebuild their kernels from weights that were forked. Needs no vLLM.

Rebuilding is `process_weights_after_loading` under vLLM's `weights_already_processed`. A method is on the
list where vLLM's source shows that this changes no tensor and does all that loading does. NVFP4 and MXFP4
experts are not: all backends but one raise there, and that one makes new tensors or leaves out a step.
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
"""The classes by which the step is defined."""
WITHOUT_STEP: Final = "vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase"


def can_be_rebuilt(method: object) -> bool:
    """Whether the class that defines the method's step is on the list, or the method has no step."""
    for base_class in type(method).__mro__:
        if STEP in vars(base_class):
            name = f"{base_class.__module__}.{base_class.__qualname__}"
            return name in REBUILDABLE or name == WITHOUT_STEP
    return True
