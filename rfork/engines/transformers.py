"""Loads Hugging Face folders through transformers, with or without weights.

On the source, use `loaded_model`; on the target, `EmptyModel`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rfork import settings as options
from rfork.engines.meta_model import MetaModel, model_errors, overwritten_weight, stores_each_once
from rfork.errors import CheckpointError, ModelError
from rfork.receiver.fallback import Fallback, checkpoint_fallback, engine_fallback
from rfork.settings import StorageSettings
from rfork.storage.location import Location

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class EmptyModel:
    """CPU model built from a folder's config.json, and fallbacks that load it from a checkpoint.

    Its weights are allocated, but neither read nor initialised; computed buffers (rotary tables) are present.

    Most checkpoints are read unchanged, from any storage. If transformers transposes or merges weights as it
    reads them, only transformers can load the checkpoint, from a local folder, and it builds another model in
    place of the first.
    """

    def __init__(self, folder: Path, checkpoint: str | Path | None = None) -> None:
        """`checkpoint` is a path, or a URI of any storage. Raises ModelError or SettingsError."""
        self._blueprint = MetaModel.of(folder)
        self.model = self._blueprint.empty()
        """After the fork, the filled model, which may be another object."""
        self.fallbacks = [] if checkpoint is None else [self._checkpoint_fallback(checkpoint)]
        """For `rfork._api.fork_with_fallbacks`."""

    def _checkpoint_fallback(self, checkpoint: str | Path) -> Fallback:
        location = Location.parse(checkpoint)
        is_local = location.scheme == "file" and Path(location.path).is_dir()
        if (
            overwritten_weight(self.model) is None
            and self._blueprint.loads_as_stored(self.model)
            and (not is_local or stores_each_once(Path(location.path), self.model))
        ):
            return checkpoint_fallback(checkpoint, options.load(StorageSettings))
        if location.scheme != "file":
            return _failed_fallback(checkpoint, "pass a local folder")
        try:
            stored = MetaModel.of(Path(location.path), dtype=self._blueprint.dtype)
        except ModelError as error:
            return _failed_fallback(checkpoint, str(error))
        if not stored.loadable:
            return _failed_fallback(checkpoint, "it contains no weight files")

        def load() -> nn.Module:
            self.model = stored.loaded()
            return self.model

        return engine_fallback(load, lambda: None, lambda: Path(location.path))


def _failed_fallback(checkpoint: str | Path, reason: str) -> Fallback:
    """Return a fallback that always fails, so that its reason is reported with those of the others."""

    def raise_unavailable(*_: object) -> None:
        raise CheckpointError(
            f"{checkpoint}: only transformers can load this model, as it converts weights while reading: {reason}"
        )

    return Fallback(f"checkpoint {checkpoint}", raise_unavailable, open=raise_unavailable)


def loaded_model(folder: Path) -> PreTrainedModel:
    """Return the model of `folder` with its weights, on the CPU. Raises ModelError."""
    return MetaModel.of(folder).loaded()


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `folder`. Raises ModelError."""
    with model_errors(folder):
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, *, tokens: int = 24) -> str:
    """Return the greedy completion of `prompt`, at most `tokens` tokens. Uses the chat template if there is one."""
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
