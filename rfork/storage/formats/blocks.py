"""Stored tensors as blocks: runs of a file read into one allocation each, and the tensors in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rfork.image.strides import contiguous_stride
from rfork.storage.formats.safetensors_file import Place
from rfork.storage.reading.engine import Extent
from rfork.storage.reading.staging import fresh

WIDEST = 16
"""Bytes of the widest item."""


@dataclass(frozen=True, slots=True)
class Block:
    """File range `[begin, end)` of one blob, that holds all of `places`: not empty, all of that blob."""

    begin: int
    end: int
    places: Sequence[Place]

    def extent(self, device: torch.device | str) -> Extent:
        """The block's bytes, and memory of its own for them: the caller's, and the tensors'."""
        return Extent(self.places[0].blob, self.begin, _memory(self.end - self.begin, self.begin, device))


def blocks_of(places: Iterable[Place], gap: int, most: int | None = None) -> Iterator[Block]:
    """Cut places, sorted by blob and offset, into blocks of at most `most` bytes, if no tensor is longer.

    What lies between two tensors is read with them where it has at most `gap` bytes. Tensors that overlap
    are in one block, so that they are tied again.
    """
    held: list[Place] = []
    begin = end = 0
    for place in places:
        last = place.offset + place.nbytes
        if held and (
            place.blob is not held[0].blob
            or place.offset > end + gap
            or (most is not None and last - begin > most and place.offset >= end)
        ):
            yield Block(begin, end, held)
            held = []
        if not held:
            begin, end = place.offset, last
        held.append(place)
        end = max(end, last)
    if held:
        yield Block(begin, end, held)


def tensors_in(block: Block, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a block as views of its memory; copies nothing. Each must lie as `aligned` says."""
    storage, shift = memory.untyped_storage(), int(memory.storage_offset()) - block.begin
    bases: dict[torch.dtype, torch.Tensor] = {}
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    for name, _, offset, _, dtype, shape, stride in block.places:
        base = bases.get(dtype)
        if base is None:
            base = bases[dtype] = torch.empty(0, dtype=dtype, device=memory.device).set_(storage)
        if stride is None:
            stride = strides.get(shape)
            if stride is None:
                stride = strides[shape] = contiguous_stride(shape)
        yield name, base.as_strided(shape, stride, (shift + offset) // base.itemsize)


def aligned(place: Place) -> bool:
    """Whether a tensor in a block's memory is at a multiple of its item's size, as in its file."""
    return place.offset % place.dtype.itemsize == 0


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as uint8, 1-D; to be called where autograd is off."""
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(storage, tensor.storage_offset() * tensor.itemsize, (tensor.nbytes,), (1,))


def _memory(nbytes: int, offset: int, device: torch.device | str) -> torch.Tensor:
    """Memory of undefined content, as far from a page, and from a widest item, as `offset` of a file."""
    shift = offset % WIDEST
    if torch.device(device).type == "cpu":
        return fresh(nbytes + shift, offset - shift)[shift:]
    return torch.empty(nbytes + shift, dtype=torch.uint8, device=device)[shift:]
