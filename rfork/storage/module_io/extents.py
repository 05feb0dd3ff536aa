"""Memory extents of tensors: overlaps and coverage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rfork.image import ranges
from rfork.image.layout import byte_extent
from rfork.image.module_tensors import BASE_TENSOR_TYPES


def geometry_of(tensor: torch.Tensor) -> object:
    """Return a value that is equal for two tensors with the same elements in the same memory."""
    if tensor.is_meta or not tensor.numel() or not has_plain_bytes(tensor):
        return id(tensor)
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride, tensor.is_conj(), tensor.is_neg()


def uncovered(names: Iterable[str], state: Mapping[str, torch.Tensor], filled: Sequence[torch.Tensor]) -> list[str]:
    """Return the `names` that the filled tensors do not cover: neither equal to one nor within their memory."""
    same = {geometry_of(tensor) for tensor in filled}
    dense: dict[torch.device, list[ranges.Range]] = {}
    for tensor in filled:
        if not tensor.is_meta and tensor.numel() and has_plain_bytes(tensor) and is_dense(tensor):
            dense.setdefault(tensor.device, []).append(extent_of(tensor))
    merged = {device: ranges.normalise(parts) for device, parts in dense.items()}
    left: list[str] = []
    for name in names:
        missing = state.get(name)
        if missing is not None and geometry_of(missing) in same:
            continue
        if missing is not None and not missing.is_meta and missing.numel() and has_plain_bytes(missing):
            begin, end = extent_of(missing)
            if any(first <= begin and end <= last for first, last in merged.get(missing.device, ())):
                continue
            if _is_written(missing, filled):
                continue
        left.append(name)
    return left


def _is_written(tensor: torch.Tensor, filled: Sequence[torch.Tensor]) -> bool:
    """Return True if each element is filled. Exact; for the few tensors that are not dense."""
    storage, size = tensor.untyped_storage(), tensor.itemsize
    written = torch.zeros(storage.nbytes() // size, dtype=torch.bool)
    for other in filled:
        if (
            has_plain_bytes(other)
            and other.itemsize == size
            and other.device == tensor.device
            and other.untyped_storage().data_ptr() == storage.data_ptr()
        ):
            written.as_strided(other.shape, other.stride(), other.storage_offset()).fill_(True)
    return bool(written.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).all())


def extent_of(tensor: torch.Tensor) -> ranges.Range:
    """Return the address range from a strided tensor's first byte to the end of its last."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    return begin, begin + byte_extent(tensor.shape, tensor.stride(), tensor.itemsize)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill the extent, each byte once."""
    if tensor.is_contiguous():
        return True
    return not overlaps_itself(tensor) and extent_of(tensor)[1] - tensor.data_ptr() == tensor.nbytes


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if two elements may share memory, as in an expanded tensor."""
    reach = 0
    for step, size in sorted(
        (step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has its own bytes in memory, laid out by strides."""
    wraps: bool = type(tensor) not in BASE_TENSOR_TYPES and is_traceable_wrapper_subclass(tensor)
    return (
        not wraps and tensor.layout is torch.strided and (tensor.is_cpu or tensor.is_cuda) and not tensor.is_quantized
    )


def overlapping(line: Sequence[tuple[int, int, str]]) -> Iterable[Sequence[tuple[int, int, str]]]:
    """Iterate over the groups of two or more extents that overlap; `line` is sorted."""
    first, reached = 0, -1
    for index, (begin, end, _) in enumerate(line):
        if begin >= reached:
            if index - first > 1:
                yield line[first:index]
            first = index
        reached = max(reached, end)
    if len(line) - first > 1:
        yield line[first:]
