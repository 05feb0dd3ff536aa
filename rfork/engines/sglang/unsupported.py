"""Which of SGLang's models are not forked, and why: it loads them by itself; nobody forks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch import nn

from rfork.engines.sglang import flags

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

SET_BY_WEIGHTS: Final = {
    "EmbeddingGemma2Model": "which function computes its norms",
    "LlavaBaseForCausalLM": "its vision tower and what it selects of it",
    "LlavaForConditionalGeneration": "image_feature_len",
    "LlavaVidForCausalLM": "its vision tower and what it selects of it",
    "YiVLForCausalLM": "its vision tower and what it selects of it",
    "NemotronHForCausalLMMTP": "whether its head is its own",
    "RadioModel": "whether it embeds videos",
}
"""Classes of SGLang 0.5.23 whose `load_weights` sets more than tensors, and what: no fork calls it."""
SCRATCH: Final = (
    "*.workspace",  # of Marlin's kernels on layers, of cutlass' on the quantisation method
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
    "*.dispatcher.*",  # buffers of what sends tokens between ranks
)
"""Tensors that each forward pass of SGLang 0.5.23 writes, or that hold addresses: none of them weights.

They hang on layers, and on fp8.py's, w4afp8.py's and compressed-tensors' methods for experts.
"""


def unsupported_config(model_config: ModelConfig) -> str | None:
    """Why this model of the server's cannot be forked, as SGLang has resolved what it was told."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_server_args

    view = resolving_view(get_server_args())
    if why := flags.unsupported_reason(
        {name: getattr(view, name) for name in flags.UNSUPPORTED if hasattr(view, name)}
    ):
        return why
    return unsupported_draft(model_config.is_draft_model, view.speculative_algorithm)


def unsupported_draft(is_draft: bool, algorithm: str | None) -> str | None:
    """Why a draft of such an algorithm is not forked: it serves with tensors that are its target's."""
    if is_draft and (algorithm or "").upper() != "STANDALONE":
        return f"a draft of {algorithm or 'no named algorithm'} shares tensors with its target"
    return None


def unsupported_model(module: nn.Module) -> str | None:
    """Why a model that stands is not forked: `load_weights` would have set more than its tensors."""
    for submodule in module.modules():
        for base_class in type(submodule).__mro__:
            if what := SET_BY_WEIGHTS.get(base_class.__name__):
                return f"{base_class.__name__} sets by its weights more than tensors: {what}"
    return None
