"""Tensors of boxes: their memory, their elements from own tensors, and the checkpoint tensors they fill."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from rfork.placement.boxes import Box, box_map
from rfork.placement.intersection import CopyType, Relocation, intersect
from rfork.placement.placement_map import PlacementMap, TensorTable, TensorType

ALIGNMENT = 64
MAX_COPY_BYTES = 64 << 20
"""Size of one copy. torch allocates that much on both devices for a copy that is not contiguous."""
MIN_MAPPED_BYTES = 1 << 20
"""Size of a tensor from which on it is virtual memory. Mapping is slower than filling a smaller one with zeros."""
MAP_NORESERVE = 0x4000
"""Flag of mmap: the kernel counts pages when they are written, not when they are mapped."""
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtype for each item size. Copies between tensors of these dtypes change no bit."""


Allocate = Callable[[int], torch.Tensor]
"""Returns uninitialised host memory of a size in bytes (uint8, 1-D)."""


class BoxMemory(Protocol):
    """Memory in which a target receives boxes."""

    def allocate_boxes(self, boxes: Sequence[Box]) -> dict[str, torch.Tensor]:
        """Return an uninitialised, contiguous tensor for each box, by its name."""
        ...

    def filled(self, boxes: Sequence[Box]) -> None:
        """Note that these boxes, allocated together, have arrived."""
        ...

    def forget(self, boxes: Sequence[Box]) -> None:
        """Release these boxes, allocated together, which have not arrived."""
        ...


def allocate_bytes(size: int) -> torch.Tensor:
    """Return memory from torch's allocator."""
    return torch.empty(size, dtype=torch.uint8)


def allocate_boxes(boxes: Sequence[Box], allocate: Allocate = allocate_bytes) -> dict[str, torch.Tensor]:
    """Return an uninitialised, contiguous tensor for each box, by its name, all in one allocation of host memory.

    Each begins at a multiple of 64 bytes. Raises ValueError if a box has a dtype that torch does not have.
    """
    offsets: list[int] = []
    end = 0
    for box in boxes:
        offsets.append(end)
        end += -(-box.byte_count // ALIGNMENT) * ALIGNMENT
    memory = allocate(end + ALIGNMENT)
    first = -memory.data_ptr() % ALIGNMENT
    return {
        box.name: memory[first + offset : first + offset + box.byte_count].view(box_dtype(box)).view(box.sizes)
        for box, offset in zip(boxes, offsets, strict=True)
    }


def box_dtype(box: Box) -> torch.dtype:
    """Return torch's dtype of a box. Raises ValueError if torch does not have it."""
    return _dtype(box.dtype, box.itemsize)


def gather(copies: Relocation, sources: Sequence[Mapping[str, torch.Tensor]], into: Mapping[str, torch.Tensor]) -> None:
    """Copy elements from the own tensors of sources to the tensors `into`, on any devices.

    Raises KeyError if a tensor is missing, and ValueError or RuntimeError if a copy is outside its tensors' memory.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for copy in copies:
            copy_type = copy.copy_type
            source = _region(
                sources[copy.source][copy.source_tensor], copy.source_offset, copy_type, copy_type.source_strides
            )
            target = _region(into[copy.target_tensor], copy.target_offset, copy_type, copy_type.target_strides)
            _copy(source, target)


class CheckpointMemory:
    """Host memory of the boxes of one checkpoint, from which its tensors are assembled. Not thread-safe.

    Boxes that are contiguous within their tensor lie in virtual memory of the complete tensor, of which only the pages
    that are written exist. So most tensors need no copy.
    """

    def __init__(self, checkpoint: TensorTable, allocate: Allocate = allocate_bytes) -> None:
        self._checkpoint = checkpoint
        self._allocate = allocate
        self._tensors: dict[str, torch.Tensor] = {}
        """Complete tensors, in virtual memory."""
        self._boxes: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        """Boxes in other memory, by checkpoint tensor."""

    def allocate_boxes(self, boxes: Sequence[Box]) -> dict[str, torch.Tensor]:
        """Return an uninitialised, contiguous tensor for each box, by its name.

        Raises ValueError if a box is not of a tensor in the checkpoint, or has a dtype that torch does not have.
        """
        found: dict[str, torch.Tensor] = {}
        others: list[Box] = []
        for box in boxes:
            index = self._checkpoint.positions.get(box.tensor)
            if index is None or self._checkpoint.type_of(index)[:3] != box.tensor_type[:3]:
                raise ValueError(f"{box.name} is no box of a tensor in the checkpoint")
            if box.is_complete or not box.is_contiguous or box.byte_count < MIN_MAPPED_BYTES:
                others.append(box)
                continue
            if box.tensor not in self._tensors:
                self._tensors[box.tensor] = _virtual_tensor(box.tensor_type)
            found[box.name] = self._tensors[box.tensor][_index(box)]
        for box, (name, tensor) in zip(others, allocate_boxes(others, self._allocate).items(), strict=True):
            self._boxes.setdefault(box.tensor, []).append((box, tensor))
            found[name] = tensor
        return found

    def filled(self, boxes: Sequence[Box]) -> None:
        """Do nothing: the boxes are where `tensors` expects them."""

    def forget(self, boxes: Sequence[Box]) -> None:
        """Release boxes that were not filled."""
        names = {box.name for box in boxes}
        for tensor, kept in list(self._boxes.items()):
            self._boxes[tensor] = [each for each in kept if each[0].name not in names]

    @cached_property
    def _types(self) -> list[TensorType]:
        return [self._checkpoint.type_of(index) for index in range(len(self._checkpoint))]

    @cached_property
    def zeros(self) -> torch.Tensor:
        """Memory of all tensors without boxes (uint8, 1-D), of the size of the largest tensor."""
        size = max((prod(each.shape) * each.itemsize for each in self._types), default=0)
        return _virtual_tensor(TensorType("uint8", 1, (size,)))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every checkpoint tensor in its order; only the elements of boxes have their values.

        A tensor is no longer referenced here when the next one is yielded. Those without boxes are `zeros`.
        """
        for name, tensor_type in zip(self._checkpoint.names, self._types, strict=True):
            if name in self._boxes or name in self._tensors:
                yield name, self._assembled(name, tensor_type)
            else:
                memory = self.zeros[: prod(tensor_type.shape) * tensor_type.itemsize]
                yield name, memory.view(_dtype(tensor_type.dtype, tensor_type.itemsize)).view(tensor_type.shape)

    def _assembled(self, name: str, tensor_type: TensorType) -> torch.Tensor:
        parts = self._boxes.pop(name, [])
        for box, tensor in parts:
            if box.is_complete:
                return tensor
        complete = self._tensors.pop(name, None)
        if complete is None:
            complete = _virtual_tensor(tensor_type)
        elements = complete.view(UNITS[tensor_type.itemsize])
        for box, tensor in parts:
            elements[_index(box)].copy_(tensor.view(elements.dtype))
        return complete


class SkippedCopies(TorchFunctionMode):
    """Context in which this thread's copies from some memory have no effect, because their targets are filled later.

    Only copies that would not convert or broadcast: everything else that reads the memory is done.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """`memory`: 1-D, contiguous, on the CPU."""
        super().__init__()
        self._addresses = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: a loader compiles nothing, and importing the compiler would take seconds."""
        return False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, unless it is such a copy."""
        if func is torch.Tensor.copy_ and len(args) > 1 and self._is_skipped(args[0], args[1]):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _is_skipped(self, destination: Any, source: Any) -> bool:
        return (
            type(source) is torch.Tensor
            and source.is_cpu
            and source.data_ptr() in self._addresses
            and isinstance(destination, torch.Tensor)
            and source.dtype == destination.dtype
            and source.shape == destination.shape
        )


class OwnMemory:
    """Memory of boxes within a target's own tensors, which a loader has prepared. Not thread-safe.

    A box that is contiguous in an own tensor is received there. Others are received in host memory and copied.
    """

    def __init__(
        self, placement_map: PlacementMap, own: Mapping[str, torch.Tensor], allocate: Allocate = allocate_bytes
    ) -> None:
        """`own`: the tensors of a model with this map. Raises ValueError if they are not those that were recorded."""
        rows = set(placement_map.owns[placement_map.sources >= 0].tolist())
        for index, name in enumerate(placement_map.own.names):
            expected = placement_map.own.type_of(index)
            if index in rows and (name not in own or type_of(own[name]) != expected):
                raise ValueError(f"{name} is not the recorded tensor {expected}")
        self._map = placement_map
        self._own = own
        self._allocate = allocate
        self._pending: dict[tuple[Box, ...], tuple[Relocation, dict[str, torch.Tensor]]] = {}
        """Copies that remain to be done when boxes have arrived, and the tensors of these boxes."""

    def allocate_boxes(self, boxes: Sequence[Box]) -> dict[str, torch.Tensor]:
        """Return an uninitialised, contiguous tensor for each box, by its name.

        Raises ValueError if a box cannot be copied to its place.
        """
        copies = intersect([box_map(boxes)], self._map)
        box_of = {box.name: box for box in boxes}
        found: dict[str, torch.Tensor] = {}
        remaining: list[int] = []
        for index, copy in enumerate(copies):
            box, copy_type = box_of[copy.source_tensor], copy.copy_type
            if box.name in found or copy.byte_count != box.byte_count or not copy_type.is_contiguous:
                remaining.append(index)
                continue
            region = _region(self._own[copy.target_tensor], copy.target_offset, copy_type, copy_type.target_strides)
            found[box.name] = region.view(box_dtype(box)).view(box.sizes)
        found |= allocate_boxes([box for box in boxes if box.name not in found], self._allocate)
        found = {box.name: found[box.name] for box in boxes}
        self._pending[tuple(boxes)] = copies.part(remaining), found
        return found

    def filled(self, boxes: Sequence[Box]) -> None:
        """Copy boxes that were received in host memory, or are needed twice, to own tensors."""
        copies, tensors = self._pending.pop(tuple(boxes))
        gather(copies, [tensors], self._own)

    def forget(self, boxes: Sequence[Box]) -> None:
        """Release the host memory of boxes that have not arrived."""
        del self._pending[tuple(boxes)]


def type_of(tensor: torch.Tensor) -> TensorType:
    """Return the type of an own tensor."""
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    return TensorType(str(tensor.dtype).removeprefix("torch."), tensor.itemsize, tuple(tensor.shape), strides)


def _index(box: Box) -> tuple[slice, ...]:
    """Return the index of a box within its checkpoint tensor."""
    return tuple(slice(begin, end) for begin, end in box.bounds)


def _virtual_tensor(tensor_type: TensorType) -> torch.Tensor:
    """Return a tensor of zeros. The pages of a large one are allocated when they are written."""
    dtype = _dtype(tensor_type.dtype, tensor_type.itemsize)
    size = prod(tensor_type.shape) * tensor_type.itemsize
    if size < max(MIN_MAPPED_BYTES, 1):
        return torch.zeros(size, dtype=torch.uint8).view(dtype).view(tensor_type.shape)
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    # The tensor references the mapping, which is unmapped with the last tensor that uses it.
    return torch.frombuffer(mapping, dtype=torch.uint8).view(dtype).view(tensor_type.shape)


def _dtype(name: str, itemsize: int) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != itemsize:
        raise ValueError(f"torch {torch.__version__} has no dtype {name} of {itemsize} bytes")
    return dtype


def _region(tensor: torch.Tensor, offset: int, copy_type: CopyType, strides: Sequence[int]) -> torch.Tensor:
    """Return a region of a tensor's memory as elements of the copy's item size. Offset and strides are in bytes."""
    itemsize = copy_type.itemsize
    if tensor.itemsize != itemsize or offset % itemsize or any(step % itemsize for step in strides):
        raise ValueError(f"a copy of {itemsize}-byte elements from or to a tensor of {tensor.dtype}")
    elements = tensor.detach().view(UNITS[itemsize])
    steps = [step // itemsize for step in strides]
    return elements.as_strided(copy_type.shape, steps, elements.storage_offset() + offset // itemsize)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy between regions; those that are not contiguous in parts, if torch would allocate memory on a device."""
    size = source.numel() * source.itemsize
    if size <= MAX_COPY_BYTES or source.device == target.device or (source.is_contiguous() and target.is_contiguous()):
        target.copy_(source)
        return
    count = source.shape[0] * MAX_COPY_BYTES // size
    for begin in range(0, source.shape[0], max(count, 1)):
        part = slice(begin, begin + count) if count else begin
        _copy(source[part], target[part])
