"""Tensor subclasses that wrap other tensors, which contain the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch.utils._python_dispatch import TraceableWrapperSubclass, is_traceable_wrapper_subclass


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that contain a tensor's bytes: itself, or the tensors it wraps (a DTensor's shard)."""
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    if not wraps:
        yield tensor
        return
    for _, inner in inner_tensors(tensor):
        yield from plain_tensors(inner)


def inner_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the inner tensors of a wrapper with their attribute names. The wrapper itself has no bytes."""
    names, _ = cast(TraceableWrapperSubclass, tensor).__tensor_flatten__()
    for name in names:
        value = getattr(tensor, name)
        if isinstance(value, torch.Tensor):  # a DTensor also lists its device mesh
            yield name, value
