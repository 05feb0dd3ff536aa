"""Methods that tests add to vLLM's workers (``--worker-extension-cls``): they run in the worker's process."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class WorkerExtension:
    """Called by ``POST /collective_rpc``, once in each worker of a server."""

    def weight_digests(self) -> dict[str, str]:
        """Return the SHA-256 of each parameter of the model, by its name."""
        worker: Any = self
        return {name: digest(tensor) for name, tensor in worker.get_model().named_parameters()}

    def load_tensors(self, folder: str) -> None:
        """Update the weights in place, by tensors in memory: vLLM sees no file."""
        worker: Any = self
        worker.reload_weights(weights_iterator=tensors(Path(folder)))


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the value of each tensor of a checkpoint."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return sha256(content.numpy().tobytes()).hexdigest()


def fused_digests(folder: Path) -> dict[str, str]:
    """Return the digests of a llama checkpoint as a server of one rank holds it, computed without an engine.

    Engines keep the projections of queries, keys and values as one parameter, and the two of the MLP as well.
    """
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors(folder):
        fused, order = name, 0
        for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
            if part in name:
                fused, order = name.replace(part, "qkv_proj"), index
        for index, part in enumerate(("gate_proj", "up_proj")):
            if part in name:
                fused, order = name.replace(part, "gate_up_proj"), index
        parts.setdefault(fused, {})[order] = tensor
    return {
        name: digest(torch.cat([found[order] for order in sorted(found)])) for name, found in parts.items()
    }
