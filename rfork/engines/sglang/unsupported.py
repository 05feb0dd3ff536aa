"""SGLang models that cannot be forked, with the reasons. SGLang loads them itself and they are not seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch import nn

from rfork.engines.sglang import flags

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

SET_BY_WEIGHTS: Final = {
    "EmbeddingGemma2Model": "the function that computes its norms",
    "LlavaBaseForCausalLM": "its vision tower and its feature selection",
    "LlavaForConditionalGeneration": "image_feature_len",
    "LlavaVidForCausalLM": "its vision tower and its feature selection",
    "YiVLForCausalLM": "its vision tower and its feature selection",
    "NemotronHForCausalLMMTP": "whether it has its own head",
    "RadioModel": "whether it embeds videos",
}
"""State other than tensors that `load_weights` sets, by class (SGLang 0.5.23). A fork does not call
`load_weights`.
"""
SCRATCH: Final = (
    "*.workspace",  # Marlin kernels on layers, cutlass on the quantisation method
    "*.a_ptr",
    "*.b_ptr",
    "*.out_ptr",
    "*.a_scales_ptr",
    "*.b_scales_ptr",
    "*.expert_offsets",
    "*.problem_sizes1",
    "*.problem_sizes2",
    "*.a_ptrs",
    "*.b_ptrs",
    "*.out_ptrs",
    "*.a_scales_ptrs",
    "*.b_scales_ptrs",
    "*.alpha_ptrs",
    "*.blockscale_offsets",
    "*.layout_sfa",
    "*.layout_sfb",
    "*._counts_buf",
    "*.oe_n_gram_ids",
    "*.exclusive_req_len_sums",
    "*workspace_buffer",
    "*.dispatcher.*",  # communication buffers of expert parallelism
)
"""Tensors that each forward pass of SGLang 0.5.23 overwrites, or that hold addresses; none are weights.

They belong to layers, and to the expert methods of fp8.py, w4afp8.py and compressed-tensors.
"""


def unsupported_config(model_config: ModelConfig) -> str | None:
    """Return why this model cannot be forked with the resolved server arguments, or None if it can."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_server_args

    view = resolving_view(get_server_args())
    if reason := flags.unsupported_reason(
        {name: getattr(view, name) for name in flags.UNSUPPORTED if hasattr(view, name)}
    ):
        return reason
    return unsupported_draft(model_config.is_draft_model, view.speculative_algorithm)


def unsupported_draft(is_draft: bool, algorithm: str | None) -> str | None:
    """Return why a draft model of this algorithm cannot be forked: it shares tensors with the main model."""
    if is_draft and (algorithm or "").upper() != "STANDALONE":
        return f"a draft model for {algorithm or 'an unnamed algorithm'} shares tensors with its main model"
    return None


def unsupported_model(module: nn.Module) -> str | None:
    """Return why a built model cannot be forked: `load_weights` would set more than its tensors."""
    for submodule in module.modules():
        for base_class in type(submodule).__mro__:
            if extra_state := SET_BY_WEIGHTS.get(base_class.__name__):
                return f"loading the weights of {base_class.__name__} sets more than tensors: {extra_state}"
    return None
