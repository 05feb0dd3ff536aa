"""State of a served model inside an engine's process, for comparisons between a source and its fork."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rfork.engines.served_model import served_model
from tests.engines.reference_digests import digest


def state_of(module: nn.Module, **extra_tensors: torch.Tensor) -> dict[str, Any]:
    """Return how a model got its weights, whether it serves them, and the SHA-256 of all its tensors."""
    served = served_model(module)
    tensors = [*module.named_parameters(), *module.named_buffers(), *extra_tensors.items()]
    return {
        "outcome": served.report.outcome if served is not None else "not forked",
        "reasons": served.report.reasons if served is not None else [],
        "image_bytes": served.seed.image.layout.image_bytes if served is not None else 0,
        "serves": served is not None and served.seed.manifest is not None,
        "tensors": {name: digest(tensor) for name, tensor in tensors if tensor.numel()},
    }
