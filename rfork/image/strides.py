"""Arithmetic of shapes and strides, in elements, and of the bytes they span."""

from __future__ import annotations

from collections.abc import Sequence


def byte_extent(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Return the bytes from a tensor's first element to the end of its last; 0 if it has none."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of `shape`."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
