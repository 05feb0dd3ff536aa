"""Tensors that vLLM's EAGLE and MTP drafts share with their main model.

Runs in a worker. vLLM loads the main model, then the draft, then replaces the draft's input embedding and output
head by those of the main model: for MTP always, for EAGLE if the draft's checkpoint has none or an equal one. It
notes in two flags of an EAGLE draft what the checkpoint has. rfork sets these flags, so that vLLM decides as it did
on the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Final

import torch
from torch import nn

from rfork.engines.shared_tensors import Patterns, not_shared
from rfork.errors import EngineMismatch
from rfork.logs import logger

log = logger(__name__)

METHODS: Final = ("eagle", "eagle3", "mtp")
"""Speculative methods whose drafts share tensors in the way described here."""
OTHER_RULES: Final = frozenset({"Gemma4MTPModel", "Step3p5MTP"})
"""Drafts for which vLLM has rules of their own."""
HAS_EMBEDDING: Final = "has_own_embed_tokens"
HAS_HEAD: Final = "has_own_lm_head"
"""The flags: the checkpoint has its own embedding or head."""
EMBEDDING: Final = ("model.embed_tokens.*",)
HEAD: Final = ("lm_head.*", "model.layers.*.shared_head.head.*")
SHARED: Final = "rfork_shared"
"""Attribute of a draft: the patterns of its shared tensors."""
FILLED: Final = "rfork_filled"
"""Attribute of a draft that was filled by a fork or a snapshot."""


class VllmTensorSharing:
    """Implements `rfork.engines.shared_tensors.TensorSharing` for a draft of `main`."""

    def __init__(self, main: nn.Module) -> None:
        get_language_model = getattr(main, "get_language_model", None)
        language_model = get_language_model() if get_language_model is not None else main
        inner: Any = getattr(language_model, "model", None)
        self._embedding = _weight(getattr(inner, "embed_tokens", None) or getattr(inner, "embedding", None))
        self._head = _weight(getattr(language_model, "lm_head", None) or getattr(main, "lm_head", None))

    def choices(self, module: nn.Module) -> Sequence[Patterns]:
        """See `TensorSharing.choices`. The head of an EAGLE draft that has one is mostly its own."""
        embeddings: Sequence[Patterns] = [EMBEDDING]
        heads: Sequence[Patterns] = [HEAD if self._head is not None else ()]
        if hasattr(module, HAS_EMBEDDING):
            embeddings = [EMBEDDING, ()] if _fits(self._embedding, _embedding_of(module)) else [()]
        if hasattr(module, HAS_HEAD) and (own := _head_of(module)) is not None:
            heads = [(), HEAD] if _same_shape(self._head, own) else [()]
        return [embedding + head for embedding, head in product(embeddings, heads)]

    def of_loaded(self, module: nn.Module) -> Patterns:
        """See `TensorSharing.of_loaded`. Compares values, as vLLM does."""
        embedding: Patterns = EMBEDDING
        head: Patterns = HEAD if self._head is not None else ()
        own_embedding, own_head = _embedding_of(module), _head_of(module)
        if hasattr(module, HAS_EMBEDDING) and (
            not _fits(self._embedding, own_embedding)
            or (getattr(module, HAS_EMBEDDING) and not _equal(self._embedding, own_embedding))
        ):
            embedding = ()
        if getattr(module, HAS_HEAD, False) and not _equal(self._head, own_head):
            head = ()
        return embedding + head

    def apply(self, module: nn.Module, shared: Patterns) -> None:
        """See `TensorSharing.apply`. Drafts without the flags share always."""
        for flag, patterns in ((HAS_EMBEDDING, EMBEDDING), (HAS_HEAD, HEAD)):
            if hasattr(module, flag):
                setattr(module, flag, not set(patterns) <= set(shared))
        vars(module)[SHARED] = shared

    def on_filled(self, module: nn.Module) -> None:
        """See `TensorSharing.on_filled`."""
        vars(module)[FILLED] = True


def shared_patterns(draft: nn.Module) -> Patterns:
    """Return the patterns of the tensors that a draft shares with its main model."""
    found: Patterns = vars(draft).get(SHARED, ())
    return found


def check_shared(draft: nn.Module, main: nn.Module) -> bool:
    """Return whether vLLM has shared the tensors of a draft as expected. Called once both models are loaded.

    Raises EngineMismatch if a draft that was filled by a fork has tensors that nothing has filled.
    """
    missing = not_shared(draft, main, shared_patterns(draft))
    if not missing:
        return True
    if FILLED in vars(draft):
        raise EngineMismatch(
            f"vLLM did not share {missing[0]} of the draft with its main model, as it did on the source",
            hint="start the server with another load format for the draft (draft_load_config), and report this",
        )
    log.error("no longer seeding the draft: vLLM did not share its tensors as expected", tensor=missing[0])
    return False


def _weight(layer: Any) -> torch.Tensor | None:
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


def _embedding_of(draft: Any) -> torch.Tensor | None:
    return _weight(getattr(getattr(draft, "model", None), "embed_tokens", None))


def _head_of(draft: Any) -> torch.Tensor | None:
    return _weight(getattr(draft, "lm_head", None))


def _fits(main: torch.Tensor | None, draft: torch.Tensor | None) -> bool:
    """Return True if vLLM may use the main model's embedding in the draft: their widths are equal."""
    return main is not None and (draft is None or main.shape[-1] == draft.shape[-1])


def _same_shape(main: torch.Tensor | None, draft: torch.Tensor | None) -> bool:
    return main is not None and draft is not None and main.shape == draft.shape


def _equal(main: torch.Tensor | None, draft: torch.Tensor | None) -> bool:
    return main is not None and draft is not None and main.shape == draft.shape and torch.equal(main, draft)
