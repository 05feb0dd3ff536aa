"""Random model large enough that its size dominates: the shapes of TinyLlama, 2.2 GB in bfloat16."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from rfork.cli.demo_model import default_cache, prepare

LAYERS, QUICK_LAYERS = 22, 1
SHARD = "500MB"
WEIGHTS = ("*.safetensors", "*.index.json")


def write_model(folder: Path, *, quick: bool) -> int:
    """Write the model into `folder`, with a tokenizer; returns the bytes of its weights. `quick`: a small
    one.

    It uses the tokenizer and the vocabulary of the demo's model. The weights are always the same.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    source = prepare(default_cache())
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=256 if quick else 2048,
        intermediate_size=1024 if quick else 5632,
        num_hidden_layers=QUICK_LAYERS if quick else LAYERS,
        num_attention_heads=4 if quick else 32,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    with no_init_weights():
        model = LlamaForCausalLM(config).bfloat16()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            # Some thousand rows are random and repeated: nothing compresses them, and generating all would
            # take a minute.
            part = torch.randn(min(parameter.numel(), 1 << 22), generator=generator).mul_(0.02).bfloat16()
            flat = parameter.view(-1)
            for begin in range(0, flat.numel(), part.numel()):
                flat[begin : begin + part.numel()] = part[: flat.numel() - begin]
    model.save_pretrained(folder, max_shard_size=SHARD)
    for file in source.glob("*token*"):
        shutil.copy(file, folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def without_weights(folder: Path, destination: Path) -> None:
    """Copy everything but the weights."""
    shutil.copytree(folder, destination, ignore=shutil.ignore_patterns(*WEIGHTS))
