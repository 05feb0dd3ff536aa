"""Groups stored tensors into blocks: file ranges that are read into one allocation each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rfork.image.layout import contiguous_stride
from rfork.image.staging import allocate_host
from rfork.storage.formats.safetensors_file import TensorLocation
from rfork.storage.io.reader import Extent

MAX_ITEM_SIZE = 16
"""Largest item size in bytes."""


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """File range `[begin, end)` of one blob that contains all `locations`; not empty."""

    begin: int
    end: int
    locations: Sequence[TensorLocation]

    def extent(self, device: torch.device | str) -> Extent:
        """Return the block's range with newly allocated memory for it."""
        return Extent(self.locations[0].blob, self.begin, _memory(self.end - self.begin, self.begin, device))


def group_into_blocks(
    locations: Iterable[TensorLocation], gap: int, max_bytes: int | None = None
) -> Iterator[TensorBlock]:
    """Group locations, sorted by blob and offset, into blocks of at most `max_bytes` bytes or one tensor.

    Gaps of up to `gap` bytes between two tensors are read along. Tensors that overlap stay in one block, so
    that they remain tied.
    """
    members: list[TensorLocation] = []
    begin = end = 0
    for location in locations:
        last = location.offset + location.nbytes
        if members and (
            location.blob is not members[0].blob
            or location.offset > end + gap
            or (max_bytes is not None and last - begin > max_bytes and location.offset >= end)
        ):
            yield TensorBlock(begin, end, members)
            members = []
        if not members:
            begin, end = location.offset, last
        members.append(location)
        end = max(end, last)
    if members:
        yield TensorBlock(begin, end, members)


def tensors_in(block: TensorBlock, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors of a block as views of its memory, without copying. Each must be `aligned`."""
    storage, shift = memory.untyped_storage(), int(memory.storage_offset()) - block.begin
    bases: dict[torch.dtype, torch.Tensor] = {}
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    for name, _, offset, _, dtype, shape, stride in block.locations:
        base = bases.get(dtype)
        if base is None:
            base = bases[dtype] = torch.empty(0, dtype=dtype, device=memory.device).set_(storage)
        if stride is None:
            stride = strides.get(shape)
            if stride is None:
                stride = strides[shape] = contiguous_stride(shape)
        yield name, base.as_strided(shape, stride, (shift + offset) // base.itemsize)


def aligned(location: TensorLocation) -> bool:
    """Return True if a tensor's offset is a multiple of its item size."""
    return location.offset % location.dtype.itemsize == 0


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's memory as 1-D uint8. Call with autograd disabled."""
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(storage, tensor.storage_offset() * tensor.itemsize, (tensor.nbytes,), (1,))


def _memory(nbytes: int, offset: int, device: torch.device | str) -> torch.Tensor:
    """Allocate uninitialised memory with the same alignment to pages and items as `offset` in the file."""
    shift = offset % MAX_ITEM_SIZE
    if torch.device(device).type == "cpu":
        return allocate_host(nbytes + shift, offset - shift)[shift:]
    return torch.empty(nbytes + shift, dtype=torch.uint8, device=device)[shift:]
