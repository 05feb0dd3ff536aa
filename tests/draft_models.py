"""Modules shaped like an engine's main model and its drafts, without an engine."""

from __future__ import annotations

from torch import nn


class Inner(nn.Module):
    """The part of a language model below its head."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layer = nn.Linear(width, width)


class Main(nn.Module):
    """A language model with an input embedding and an output head."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.model = Inner(width, vocabulary)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)


class Draft(nn.Module):
    """A draft with tensors of its own for the embedding and, with `has_head`, for the head."""

    def __init__(self, width: int, vocabulary: int, *, has_head: bool = True) -> None:
        super().__init__()
        self.model = Inner(width, vocabulary)
        if has_head:
            self.lm_head = nn.Linear(width, vocabulary, bias=False)


class EagleDraft(Draft):
    """A draft with vLLM's flags, which state what its files contain."""

    has_own_embed_tokens = False
    has_own_lm_head = False
