"""Tensors that SGLang's EAGLE and MTP drafts share with their main model.

Runs in a scheduler. SGLang replaces the draft's input embedding and output head by those of the main model once it has
loaded both. Which ones depends on the algorithm and the draft's class, not on its checkpoint. rfork makes the same
calls earlier, before it captures the draft: SGLang's own calls then change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from rfork.engines.shared_tensors import Patterns, shared_names

ALGORITHMS: Final = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms whose drafts share tensors in the way described here."""


class SglangTensorSharing:
    """Implements `rfork.engines.shared_tensors.TensorSharing` for a draft of `main`."""

    def __init__(self, main: nn.Module, algorithm: str) -> None:
        self._main = main
        self._algorithm = algorithm.upper()

    def choices(self, module: nn.Module) -> Sequence[Patterns]:
        """See `TensorSharing.choices`. There is one. SGLang's map of frequent tokens gets its memory, too."""
        config: Any = getattr(module, "config", None)
        vocabulary, all_tokens = (getattr(config, name, None) for name in ("draft_vocab_size", "vocab_size"))
        if getattr(module, HOT_TOKENS, ...) is None and vocabulary not in (None, all_tokens):
            setattr(module, HOT_TOKENS, torch.empty(vocabulary, dtype=torch.int64))
        return [self._share(module)]

    def of_loaded(self, module: nn.Module) -> Patterns:
        """See `TensorSharing.of_loaded`."""
        return self._share(module)

    def apply(self, module: nn.Module, shared: Patterns) -> None:
        """See `TensorSharing.apply`: the tensors are already shared."""

    def on_filled(self, module: nn.Module) -> None:
        """See `TensorSharing.on_filled`."""

    def _share(self, draft: Any) -> Patterns:
        """Share what SGLang's EAGLE workers share. Returns the names of the shared tensors."""
        embedding, head = _embedding_and_head(self._main, draft)
        if self._algorithm == "EAGLE3" and not getattr(draft, "load_lm_head_from_target", False):
            draft.set_embed(embedding)
        else:
            draft.set_embed_and_head(embedding, head)
        return shared_names(draft, self._main)


HOT_TOKENS: Final = "hot_token_id"
"""Attribute of an EAGLE-3 draft: the token of the main model for each of its own. Its loader creates it."""


def _embedding_and_head(main: Any, draft: nn.Module) -> tuple[Any, Any]:
    try:
        from sglang.srt.speculative.pp_draft_embedding import resolve_target_embed_and_head
    except ImportError:  # before 0.5.23
        embedding, head = main.get_embed_and_head()
    else:
        embedding, head = resolve_target_embed_and_head(main, draft_model=draft)
    return embedding, head
