"""Tensors that are difficult for file formats, and comparison of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

KEY = bytes(range(32))
PASSWORD = "correct horse"


Raw = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]


def samples() -> dict[str, torch.Tensor]:
    """Return one tensor of each dtype and of each unusual shape."""
    generator = torch.Generator().manual_seed(7)
    return {
        "embed.weight": torch.randn(33, 17, generator=generator),
        "layers.0.norm": torch.randn(5, generator=generator).to(torch.bfloat16),
        "layers.0.half": torch.randn(4, 3, generator=generator).half(),
        "layers.0.double": torch.randn(3, generator=generator).double(),
        "layers.0.fp8": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
        "layers.0.fp8_wide": torch.randn(9, generator=generator).to(torch.float8_e5m2),
        "ids": torch.arange(12).reshape(3, 4),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "shorts": torch.arange(-3, 4, dtype=torch.int16),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "strided": torch.arange(20.0)[::2],
    }


def raw_tensor(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes, which are equal for equal tensors, NaN included."""
    contiguous = tensor.detach().contiguous()
    data = contiguous.reshape(-1).view(torch.uint8).numpy().tobytes() if contiguous.numel() else b""
    return tensor.dtype, tuple(tensor.shape), data


def raw_tensors(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> Raw:
    """Return the same of named tensors, by name."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: raw_tensor(tensor) for name, tensor in items}
