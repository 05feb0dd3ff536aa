"""Converts a GGUF model to a Hugging Face checkpoint.

Usage: ``python -m rfork.cli.demo.convert SOURCE DESTINATION``. It runs in a separate process, because reading
GGUF uses several times the model's memory, and because the libraries print progress bars and warnings.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

# Small enough that 269 MB become three files, so that the demo covers sharded checkpoints.
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
    # The weights are now plain tensors.
    model.config.__dict__.pop("quantization_config", None)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(target, max_shard_size=SHARD)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
