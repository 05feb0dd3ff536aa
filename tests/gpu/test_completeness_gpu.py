"""Proof that an image is complete, from the statistics of torch's CUDA allocator."""

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
    """A model is complete after work that fills the workspaces of torch's libraries."""
    torch.cuda.init()
    proof = Completeness()
    module = nn.Sequential(*(nn.Linear(513, 511, device="cuda") for _ in range(8)))
    with torch.no_grad():
        _ = module[0](torch.ones(4, 513, device="cuda")).sum().item()
    proof.check(module)


def test_an_unreferenced_tensor_is_detected() -> None:
    """A tensor that no part of the model references is detected."""
    torch.cuda.init()
    proof = Completeness()
    module = nn.Linear(1024, 1024, device="cuda")
    HIDDEN.append(torch.ones(1 << 20, device="cuda"))
    try:
        with pytest.raises(UnsupportedTensor, match=r"allocated .* bytes .* that belong to none of its tensors"):
            proof.check(module)
    finally:
        HIDDEN.clear()
