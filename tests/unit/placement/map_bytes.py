"""Copies bytes as placement maps and relocations describe, one element at a time in the meaning of strides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from rfork.placement.intersection import Relocation
from rfork.placement.placement_map import PlacementMap, TensorType

PADDING = 0xEE
"""Value of bytes that nothing wrote."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for each item size: bytes are compared, not values."""


def random_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of random bytes without the byte for padding."""
    size = prod(shape) * dtype.itemsize
    return torch.randint(0, PADDING, (size,), dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def empty_memory(tensor_type: TensorType) -> torch.Tensor:
    """Return the memory of an own tensor as bytes."""
    span = sum((size - 1) * step for size, step in zip(tensor_type.shape, tensor_type.strides, strict=True))
    return torch.full((span + tensor_type.itemsize,), PADDING, dtype=torch.uint8)


def padding_of(itemsize: int) -> torch.Tensor:
    """Return the integer of one element that nothing wrote."""
    return torch.full((itemsize,), PADDING, dtype=torch.uint8).view(INTEGERS[itemsize])


def strided(
    memory: torch.Tensor, itemsize: int, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Return a region of memory as a tensor of integers; offset and strides are in bytes."""
    assert offset % itemsize == 0
    steps = [step // itemsize for step in strides]
    return memory.view(INTEGERS[itemsize]).as_strided(tuple(shape), steps, offset // itemsize)


def filled_from_checkpoint(
    placement_map: PlacementMap, checkpoint: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the memory of each own tensor, filled from the checkpoint by the rows of the map."""
    own = placement_map.own
    memory = {name: empty_memory(own.type_of(index)) for index, name in enumerate(own.names)}
    for row in placement_map:
        if row.operation:
            continue
        tensor = checkpoint[row.checkpoint]
        itemsize = tensor.itemsize
        box = tensor.view(INTEGERS[itemsize])[
            tuple(slice(first, first + size) for first, size in zip(row.start, row.sizes, strict=True))
        ]
        region = strided(memory[row.own], itemsize, row.offset, row.sizes, row.strides)
        assert torch.all(region == padding_of(itemsize))  # each element is written once
        region.copy_(box)
    return memory


def filled_from_sources(
    relocation: Relocation, sources: Sequence[Mapping[str, torch.Tensor]], target: PlacementMap
) -> dict[str, torch.Tensor]:
    """Return the memory of each own tensor of the target, filled from memory of the sources."""
    own = target.own
    memory = {name: empty_memory(own.type_of(index)) for index, name in enumerate(own.names)}
    for copy in relocation:
        itemsize, shape, source_strides, target_strides = copy.copy_type
        region = strided(memory[copy.target_tensor], itemsize, copy.target_offset, shape, target_strides)
        assert torch.all(region == padding_of(itemsize))  # each element is written once
        there = sources[copy.source][copy.source_tensor]
        region.copy_(strided(there, itemsize, copy.source_offset, shape, source_strides))
    return memory
