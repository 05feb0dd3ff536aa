"""The proof that an image is complete, by the books of torch's CUDA allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rfork.engines.completeness import Completeness
from rfork.errors import UnsupportedTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]

HIDDEN: list[torch.Tensor] = []


def test_a_model_on_a_gpu_is_complete() -> None:
    """After work that fills the workspaces of torch's libraries, too."""
    torch.cuda.init()
    proof = Completeness()
    module = nn.Sequential(*(nn.Linear(513, 511, device="cuda") for _ in range(8)))
    with torch.no_grad():
        _ = module[0](torch.ones(4, 513, device="cuda")).sum().item()
    proof.check(module)


def test_memory_out_of_sight_is_found() -> None:
    """A tensor that nothing of the model refers to."""
    torch.cuda.init()
    proof = Completeness()
    module = nn.Linear(1024, 1024, device="cuda")
    HIDDEN.append(torch.ones(1 << 20, device="cuda"))
    try:
        with pytest.raises(UnsupportedTensor, match=r"bytes of device memory that are no tensor of the model"):
            proof.check(module)
    finally:
        HIDDEN.clear()
