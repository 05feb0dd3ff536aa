"""Hugging Face folders through transformers: a model with its weights, or without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rfork.errors import MissingExtra, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turn what transformers raises for a folder it cannot use into one line."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json", hint="name the folder of a Hugging Face model")
    try:
        yield
    except ImportError as error:
        raise MissingExtra("transformers", extra="transformers", why=str(error)) from None
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{folder}: {first}") from None


def empty_model(folder: Path) -> PreTrainedModel:
    """The model of `folder`'s config.json on the CPU, its weights allocated but not read or initialised.

    What a model computes for itself when it is built (rotary tables) is there. Raises ModelError.
    """
    with _naming(folder):
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=config.dtype or torch.float32
            )
        model.tie_weights()
        model.eval()  # type: ignore[no-untyped-call]
        return model


def loaded_model(folder: Path) -> PreTrainedModel:
    """The model of `folder` with its weights, on the CPU. Raises ModelError."""
    with _naming(folder):
        from transformers import AutoModelForCausalLM

        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype="auto"
        )
        model.eval()  # type: ignore[no-untyped-call]
        return model


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `folder`. Raises ModelError."""
    with _naming(folder):
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
