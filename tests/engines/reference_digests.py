"""Digests of weights computed without rfork, to compare those of a server with those on disk."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load_file

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parameters that engines build from several tensors of a checkpoint."""


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the value of each tensor of a checkpoint."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return sha256(content.numpy().tobytes()).hexdigest()


def fused_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the parameters that a server of one rank builds from a llama checkpoint."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in read_tensors(folder):
        fused, position = _fused(name)
        parts.setdefault(fused, {})[position] = tensor
    return {name: digest(torch.cat([found[position] for position in sorted(found)])) for name, found in parts.items()}


def _fused(name: str) -> tuple[str, int]:
    """Return the parameter that contains a checkpoint's tensor, and the tensor's position in it."""
    for fused, parts in FUSED.items():
        for position, part in enumerate(parts):
            if part in name:
                return name.replace(part, fused), position
    return name, 0
