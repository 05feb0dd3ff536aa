"""Hugging Face folders through transformers: a model with its weights, or without.

Runs on the source as `loaded_model`, on the target as `EmptyModel`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rfork import settings as options
from rfork.engines.meta_model import MetaModel
from rfork.engines.pretrained_config import model_errors
from rfork.errors import CheckpointError, ModelError
from rfork.receiver.fallback import Fallback, checkpoint_fallback, engine_fallback
from rfork.settings import StorageSettings
from rfork.storage.location import Location

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class EmptyModel:
    """The model of a folder's config.json on the CPU, and the checkpoint that it may be filled from.

    Its weights are allocated, but neither read nor initialised; what a model computes for itself when it is
    built (rotary tables) is there.

    Most checkpoints are read as they lie, wherever that is. Where transformers turns or merges weights as it
    reads them, a folder of this machine is left to it: it builds another model in the place of the first.
    """

    def __init__(self, folder: Path, checkpoint: str | Path | None = None) -> None:
        """`checkpoint` is a path, or a URI of any storage. Raises ModelError or SettingsError."""
        self._blueprint = MetaModel.of(folder)
        self.model = self._blueprint.empty()
        """After the fork, the one that is filled: maybe not the first."""
        self.fallbacks = [] if checkpoint is None else [self._checkpoint_fallback(checkpoint)]
        """For `rfork._api.fork_with_fallbacks`."""

    def _checkpoint_fallback(self, checkpoint: str | Path) -> Fallback:
        if self._blueprint.loads_as_stored(self.model):
            return checkpoint_fallback(checkpoint, options.load(StorageSettings))
        location = Location.parse(checkpoint)
        if location.scheme != "file":
            return _failed_fallback(checkpoint, "give it as a folder of this machine")
        try:
            stored = MetaModel.of(Path(location.path), dtype=self._blueprint.dtype)
        except ModelError as error:
            return _failed_fallback(checkpoint, str(error))
        if not stored.loadable:
            return _failed_fallback(checkpoint, "no file of weights is there")

        def load() -> nn.Module:
            self.model = stored.loaded()
            return self.model

        return engine_fallback(load, lambda: None)


def _failed_fallback(checkpoint: str | Path, why: str) -> Fallback:
    """A way that does not work, so that its reason stands beside those of the others."""

    def raise_unavailable(*_: object) -> None:
        raise CheckpointError(
            f"{checkpoint}: transformers turns weights of this model as it reads them, so only it can: {why}"
        )

    return Fallback(f"checkpoint {checkpoint}", raise_unavailable, open=raise_unavailable)


def loaded_model(folder: Path) -> PreTrainedModel:
    """The model of `folder` with its weights, on the CPU. Raises ModelError."""
    return MetaModel.of(folder).loaded()


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `folder`. Raises ModelError."""
    with model_errors(folder):
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, *, tokens: int = 24) -> str:
    """The greedy answer to `prompt`, at most `tokens` tokens; uses the chat template if there is one."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]  # mixed in where transformers' types do not see it
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    generated_ids = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(generated_ids, skip_special_tokens=True)).strip()
