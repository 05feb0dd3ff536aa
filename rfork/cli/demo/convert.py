"""Writes a GGUF model as a Hugging Face checkpoint: ``python -m rfork.cli.demo.convert SOURCE TARGET``.

A process of its own, because reading GGUF takes several times the model's memory, and because the progress
bars and warnings of the libraries it needs are not for the demo's reader.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

# Small enough that 269 MB become three files: a checkpoint of one shard would not show that shards are read.
SHARD = "100MB"


def convert(source: Path, target: Path) -> None:
    """Write the GGUF file `source`, dequantised to bfloat16, as a checkpoint into the folder `target`."""
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    # The weights are plain tensors from here on.
    model.config.__dict__.pop("quantization_config", None)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(target, max_shard_size=SHARD)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
