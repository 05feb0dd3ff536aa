"""Model folders for the engines, made without a network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch

Architecture = Literal["llama", "qwen3", "qwen3_moe"]
# Weight files in a Hugging Face folder, and their index.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.gguf")


def copy_without_weights(folder: Path, parent: Path) -> Path:
    """Copy a model's folder below `parent`, with the same name, without weights."""
    return Path(shutil.copytree(folder, parent / folder.name, ignore=shutil.ignore_patterns(*WEIGHTS)))


def copy_with_weights(folder: Path, parent: Path) -> Path:
    """Copy a model's folder below `parent`, with the same name and its weights."""
    return Path(shutil.copytree(folder, parent / folder.name))


def make_tiny(folder: Path, tokenizer: Path, architecture: Architecture, *, seed: int, **options: object) -> None:
    """Write a random float32 model of hidden size 256 and 4 layers (16 MB, two shards or more) into `folder`.

    Equal `seed` values produce equal weights; `options` replace values of the configuration. The tokenizer's files and
    their vocabulary of 512 come from the folder `tokenizer`. The context length is 1,024 tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, object] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        # Five times the default, with which a random model only repeats its last token.
        "initializer_range": 0.1,
    }
    config = AutoConfig.for_model(architecture, **(values | options))
    folder.mkdir(parents=True)
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="8MB")
