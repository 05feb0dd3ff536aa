"""Poison in the memory that a fallback must fill, to find tensors that it did not write. Runs on the target.

A failed transfer leaves any bytes in any tensor, so a loader that skips one would leave a mixture of two
images. Floating-point tensors are filled with a NaN that no computation produces, others with random bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping

import torch

from rfork.image.wrappers import plain_tensors
from rfork.storage.module_io.extents import is_dense, overlaps_itself

BLOCK = 8
"""Consecutive bytes that identify the poison in tensors that may contain any bytes."""
STEP = 64 << 20
"""Bytes per comparison, which bounds its memory."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
