"""Tensor subclasses that wrap other tensors: only what they wrap has bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch.utils._python_dispatch import TraceableWrapperSubclass, is_traceable_wrapper_subclass


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a tensor's bytes: itself, or what a subclass wraps (a DTensor's shard)."""
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    if not wraps:
        yield tensor
        return
    for _, inner in inner_tensors(tensor):
        yield from plain_tensors(inner)


def inner_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a wrapper wraps, by the names it has there: the wrapper has no bytes of its own."""
    names, _ = cast(TraceableWrapperSubclass, tensor).__tensor_flatten__()
    for name in names:
        value = getattr(tensor, name)
        if isinstance(value, torch.Tensor):  # a DTensor names its device mesh as well
            yield name, value
