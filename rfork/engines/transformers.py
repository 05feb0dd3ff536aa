"""Hugging Face folders through transformers: a model with its weights, or without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rfork.engines.blueprint import Blueprint, naming

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def empty_model(folder: Path) -> PreTrainedModel:
    """The model of `folder`'s config.json on the CPU, its weights allocated but not read or initialised.

    What a model computes for itself when it is built (rotary tables) is there. Raises ModelError.
    """
    return Blueprint.of(folder).empty()


def loaded_model(folder: Path) -> PreTrainedModel:
    """The model of `folder` with its weights, on the CPU. Raises ModelError."""
    return Blueprint.of(folder).loaded()


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `folder`. Raises ModelError."""
    with naming(folder):
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, *, tokens: int = 24
) -> str:
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
            pad_token_id=tokenizer.pad_token_id
            if tokenizer.pad_token_id is not None
            else tokenizer.eos_token_id,
        )
    answer = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
