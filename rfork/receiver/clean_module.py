"""The module that a fork fills, and what a loader leaves unchanged in it. Runs on the target.

A failed transfer may leave any bytes in any tensor. A checkpoint or an engine's loader overwrites the parameters
and persistent buffers, but not what the model computed when it was built (rotary tables, masks): these are copied
before the first byte arrives. A loader that skips a tensor would leave a mixture of two images, so the memory that
it must fill is poisoned first: floating-point tensors with a NaN that no computation produces, others with random
bytes.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import nn

from rfork.errors import UserError
from rfork.image import ranges
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.image.module_tensors import plain_tensors
from rfork.storage.module_io.module_state import extent_of, is_dense, overlaps_itself, registered_state

BLOCK = 8
"""Consecutive bytes that identify the poison in tensors that may contain any bytes."""
STEP = 64 << 20
"""Bytes per comparison, which bounds its memory."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TargetModule:
    """The module that a fork fills."""

    module: nn.Module
    image: Image
    exclude: Sequence[str]
    """Patterns of tensors that the image leaves out; see `capture`."""
    derived: DerivedTensors | None
    """The tensors that no fallback would write; None if there is no fallback."""

    def is_in_place(self) -> bool:
        """Return whether the image still is the module's memory: no loader has replaced its tensors."""
        return self.image.shares_memory_with(capture(self.module, exclude=self.exclude))


class DerivedTensors:
    """Tensors that a loader would not write, copied at construction and put back by `restore`.

    `kept` has the copies (uint8, 1-D), each with its offset in the image, in image order. `loadable` are the
    tensors of the image that a loader must write: parameters and persistent buffers.
    """

    def __init__(self, module: nn.Module, image: Image) -> None:
        """Raises UserError if the module's `state_dict` raises."""
        regions = image.regions
        carried = ranges.normalise(
            (begin, begin + length) for begin, length in zip(regions.addresses, regions.lengths, strict=True)
        )
        self.loadable = {
            name: tensor
            for name, tensor in _loadable(module).items()
            if any(_inside(extent_of(plain), carried) for plain in _with_bytes(tensor))
        }
        loaded = ranges.normalise(
            extent_of(plain) for tensor in self.loadable.values() for plain in _with_bytes(tensor) if is_dense(plain)
        )
        self.kept: list[tuple[int, torch.Tensor]] = []
        self._regions: list[torch.Tensor] = []
        offset = 0
        for index, (begin, length) in enumerate(zip(regions.addresses, regions.lengths, strict=True)):
            if not _inside((begin, begin + length), loaded):
                self.kept.append((offset, regions[index].clone()))
                self._regions.append(regions[index])
            offset += length

    @property
    def storages(self) -> frozenset[int]:
        """Return the addresses of the tensors' storages."""
        return frozenset(region.untyped_storage().data_ptr() for region in self._regions)

    @property
    def nbytes(self) -> int:
        """Memory used by the copies."""
        return sum(copy.nbytes for _, copy in self.kept)

    def restore(self) -> None:
        """Restore the bytes from before the transfer."""
        with torch.no_grad():
            for region, (_, copy) in zip(self._regions, self.kept, strict=True):
                region.copy_(copy)


class Poison:
    """Poison written at construction; `unwritten` finds the tensors that still contain it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the tensors, which must be in CPU or CUDA memory and must not overlap themselves."""
        # As two bytes of a bfloat16 or float16, and therefore of wider types: a NaN, but not the usual one.
        payload = secrets.choice([byte for byte in range(0x81, 0xFF) if byte != 0xC0])
        self._nan = bytes((payload, 0xFF))
        # None of these bytes is a valid bool.
        self._block = bytes(0x80 | byte for byte in secrets.token_bytes(BLOCK))
        self._versions: dict[str, int] = {}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for name, tensor in tensors.items():
                self._versions[name] = _version(tensor)
                for plain in plain_tensors(tensor):
                    self._write(plain)

    def unwritten(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the tensors with parts that were not overwritten; other names are ignored."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return [
                name
                for name, version in self._versions.items()
                if (tensor := tensors.get(name)) is not None
                and any(
                    self._is_unwritten(plain, written=_version(tensor) != version) for plain in plain_tensors(tensor)
                )
            ]

    def _write(self, tensor: torch.Tensor) -> None:
        if not can_be_poisoned(tensor):
            return
        if _is_floating(tensor):
            elements = _elements(tensor)
            elements.fill_(_constant(self._nan, elements.itemsize))
        elif is_dense(tensor):
            memory = _memory(tensor)
            block_bytes = memory.numel() // BLOCK * BLOCK
            memory[:block_bytes].view(-1, BLOCK).copy_(self._row(tensor.device))
            memory[block_bytes:].copy_(self._row(tensor.device)[: memory.numel() - block_bytes])
        else:
            _elements(tensor).fill_(_constant(self._block, tensor.itemsize))

    def _is_unwritten(self, tensor: torch.Tensor, *, written: bool) -> bool:
        if not can_be_poisoned(tensor):
            return False
        if _is_floating(tensor):
            elements = _elements(tensor)
            constant = _constant(self._nan, elements.itemsize)
            return any(bool((part == constant).any()) for part in _parts(elements))
        row = self._row(tensor.device)
        if not is_dense(tensor):
            alike = bool((_elements(tensor) == _constant(self._block, tensor.itemsize)).all())
            return alike and (tensor.nbytes >= BLOCK or not written)
        memory = _memory(tensor)
        if memory.numel() < BLOCK:  # which the loader may have written by chance
            return not written and torch.equal(memory, row[: memory.numel()])
        blocks = memory[: memory.numel() // BLOCK * BLOCK].view(-1, BLOCK)
        return any(bool((part == row).all(1).any()) for part in torch.split(blocks, STEP // BLOCK))

    def _row(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(list(self._block), dtype=torch.uint8, device=device)


def can_be_poisoned(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has its own bytes and non-overlapping elements."""
    return (
        tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not tensor.is_quantized
        and tensor.numel() > 0
        and not overlaps_itself(tensor)
    )


def _is_floating(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1


def _constant(pattern: bytes, itemsize: int) -> int:
    repeated = (pattern * BLOCK)[:itemsize]
    return int.from_bytes(repeated, "little", signed=itemsize > 1)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers of their size, whatever the dtype and views; 16 bytes become two."""
    storage, shape, stride = tensor.untyped_storage(), tuple(tensor.shape), tensor.stride()
    offset, itemsize = int(tensor.storage_offset()), tensor.itemsize
    if itemsize not in INTEGERS:
        shape, stride = (*shape, 2), (*(step * 2 for step in stride), 1)
        offset, itemsize = offset * 2, itemsize // 2
    seen = torch.empty(0, dtype=INTEGERS[itemsize], device=tensor.device)
    return seen.set_(storage, offset, shape, tuple(stride))


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor."""
    offset = int(tensor.storage_offset()) * tensor.itemsize
    seen = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return seen.set_(tensor.untyped_storage(), offset, (tensor.nbytes,), (1,))


def _parts(elements: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in parts of about `STEP` bytes."""
    if not elements.dim() or elements.nbytes <= STEP:
        yield elements
        return
    rows = max(1, STEP * elements.shape[0] // elements.nbytes)
    for part in torch.split(elements, rows):
        yield from _parts(part[0]) if part.nbytes > STEP and part.shape[0] == 1 else (part,)


def _version(tensor: torch.Tensor) -> int:
    """Return a number that changes when torch writes to the tensor."""
    return -1 if tensor.is_inference() else tensor._version


def _loadable(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, except those that the module leaves out of its state."""
    try:
        state = module.state_dict(keep_vars=True)
        objects = {id(value) for value in state.values()}
    except Exception as error:  # the module's own code may raise anything
        raise UserError(f"the module's state_dict() raised {one_line(error)}") from error
    return {name: tensor for name, tensor in registered_state(module).items() if name in state or id(tensor) in objects}


def _with_bytes(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the tensors with its bytes, without overlapping elements."""
    return (plain for plain in plain_tensors(tensor) if can_be_poisoned(plain))


def _inside(extent: ranges.Range, merged: Sequence[ranges.Range]) -> bool:
    index = bisect_right(merged, extent[0], key=itemgetter(0)) - 1
    return index >= 0 and extent[1] <= merged[index][1]


def one_line(error: Exception) -> str:
    """Return an exception of foreign code as one line of text."""
    return " ".join(f"{type(error).__name__}: {error}".split())
