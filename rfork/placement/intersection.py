"""Intersection of placement maps: the strided copies that fill one rank's tensors from other ranks' tensors. Pure.

A copy reads a box from one own tensor of a source and writes it to one own tensor of the target; both have the same
shape, and a byte stride for each dimension. Adjacent dimensions are merged, so a contiguous region has one dimension.
This module does not import torch, so the planner may use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from rfork.placement.placement_map import Column, PlacementMap, TensorType
from rfork.placement.strided import Bounds, common, difference

INDEXED_ROWS = 32
"""Number of source boxes of one checkpoint tensor from which on candidates are found by their sorted starts."""


class CopyType(NamedTuple):
    """Shape and byte strides of a copy. The elements along the dimensions are of `itemsize` bytes."""

    itemsize: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """True if all elements are adjacent, in the same order, on both sides."""
        strides = (self.itemsize,) * len(self.shape)  # adjacent dimensions are merged
        return self.source_strides == self.target_strides == strides[:1]


class StridedCopy(NamedTuple):
    """One copy: a source, its own tensor and byte offset there; the target's own tensor and byte offset; its type."""

    source: int
    source_tensor: str
    source_offset: int
    target_tensor: str
    target_offset: int
    copy_type: CopyType

    @property
    def byte_count(self) -> int:
        """Number of bytes copied."""
        return self.copy_type.itemsize * prod(self.copy_type.shape)


class Uncovered(NamedTuple):
    """An own tensor of the target that the sources cannot fill, and the reason."""

    tensor: str
    reason: str


@dataclass(frozen=True)
class Relocation:
    """Copies that fill the target, each byte once, and the tensors that they do not fill.

    Columns of equal length, one entry per copy; iterating creates `StridedCopy` objects.
    """

    sources: list[int]
    source_tensors: list[str]
    source_offsets: list[int]
    target_tensors: list[str]
    target_offsets: list[int]
    copy_types: list[CopyType]
    uncovered: tuple[Uncovered, ...]
    """At most one per tensor. If there is any, the target cannot be filled from these sources."""
    unwritten: tuple[str, ...]
    """Own tensors of the target with elements that its loader never wrote or filled with a constant: padding, buffers.

    No source is needed for them: the target's engine initialises them.
    """

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[StridedCopy]:
        return map(
            StridedCopy,
            self.sources,
            self.source_tensors,
            self.source_offsets,
            self.target_tensors,
            self.target_offsets,
            self.copy_types,
        )

    @property
    def byte_count(self) -> int:
        """Number of bytes that the copies read."""
        return sum(copy.byte_count for copy in self)

    def part(self, indices: Sequence[int]) -> Relocation:
        """Return some copies."""
        return replace(
            self,
            sources=[self.sources[index] for index in indices],
            source_tensors=[self.source_tensors[index] for index in indices],
            source_offsets=[self.source_offsets[index] for index in indices],
            target_tensors=[self.target_tensors[index] for index in indices],
            target_offsets=[self.target_offsets[index] for index in indices],
            copy_types=[self.copy_types[index] for index in indices],
        )


class _SourceBoxes:
    """Boxes of one map by checkpoint tensor."""

    def __init__(self, placement_map: PlacementMap) -> None:
        self.map = placement_map
        self.starts = placement_map.starts.tolist()
        self.positions = placement_map.start_positions.tolist()
        self.types = placement_map.box_type_indices.tolist()
        self.owns = placement_map.owns.tolist()
        self.offsets = placement_map.offsets.tolist()
        self._index: dict[int, tuple[int, Column, Column, Column]] = {}

    def bounds(self, row: int) -> Bounds:
        begin = self.starts[self.positions[row] : self.positions[row + 1]]
        return tuple(
            (first, first + size) for first, size in zip(begin, self.map.box_types[self.types[row]].sizes, strict=True)
        )

    def strides(self, row: int) -> tuple[int, ...]:
        strides: tuple[int, ...] = self.map.box_types[self.types[row]].strides
        return strides

    def candidates(self, tensor: int, wanted: Bounds) -> Sequence[int]:
        """Return the rows of a checkpoint tensor that may overlap a box."""
        rows = self.map.rows_of_checkpoint.get(tensor, ())
        if len(rows) < INDEXED_ROWS or not wanted:
            return rows
        if tensor not in self._index:
            bounds = np.array([self.bounds(row) for row in rows], dtype=np.int64)
            dim = max(range(bounds.shape[1]), key=lambda each: len(np.unique(bounds[:, each, 0])))
            order = np.argsort(bounds[:, dim, 0], kind="stable")
            ordered = bounds[order, dim]
            self._index[tensor] = (
                dim,
                np.array(rows, dtype=np.int64)[order],
                ordered[:, 0],
                np.maximum.accumulate(ordered[:, 1]),
            )
        dim, sorted_rows, begins, ends = self._index[tensor]
        begin, end = wanted[dim]
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(begins, end, side="left"))
        found: list[int] = sorted_rows[first:last].tolist()
        return found


class Owners(NamedTuple):
    """Sources that have one checkpoint tensor."""

    positions: list[tuple[int, int]]
    """Position of each source, and the index of the tensor in its checkpoint table."""
    mismatch: str
    """Reason for which a source with a tensor of this name is not one of them; empty if there is none."""


class Overlap(NamedTuple):
    """Part of a wanted box that a row of a source has."""

    source: int
    row: int
    row_bounds: Bounds
    bounds: Bounds


class SourcePool:
    """Sources in the order of preference, and the search for boxes in them."""

    def __init__(self, sources: Sequence[PlacementMap]) -> None:
        self.boxes = [_SourceBoxes(source) for source in sources]

    def owners(self, name: str, tensor_type: TensorType) -> Owners:
        """Return the sources that have a checkpoint tensor."""
        positions: list[tuple[int, int]] = []
        mismatch = ""
        for position, source in enumerate(self.boxes):
            tensor = source.map.checkpoint.positions.get(name)
            if tensor is None:
                continue
            there = source.map.checkpoint.type_of(tensor)
            if there == tensor_type:
                positions.append((position, tensor))
            else:
                mismatch = (
                    f"checkpoint tensor {name} is {tensor_type.dtype}{list(tensor_type.shape)} for the target, "
                    f"{there.dtype}{list(there.shape)} for a source"
                )
        return Owners(positions, mismatch)

    def overlaps(self, owners: Owners, box: Bounds) -> tuple[list[Overlap], list[Bounds]]:
        """Return disjoint parts of a box that the owners have, and the parts that none has."""
        found: list[Overlap] = []
        remaining = [box]
        for position, tensor in owners.positions:
            source = self.boxes[position]
            for candidate in source.candidates(tensor, box):
                there = source.bounds(candidate)
                left: list[Bounds] = []
                for part in remaining:
                    overlap = part if part == there else common(part, there)
                    if overlap is None:
                        left.append(part)
                        continue
                    if overlap != part:
                        left.extend(difference(part, overlap))
                    found.append(Overlap(position, candidate, there, overlap))
                remaining = left
                if not remaining:
                    return found, []
        return found, remaining

    def missing_reason(self, owners: Owners, name: str, part: Bounds) -> str:
        """Return the reason for which no source has a part of a checkpoint tensor."""
        if owners.mismatch:
            return owners.mismatch
        index = ", ".join(f"{begin}:{end}" for begin, end in part)
        reason = f"no source has {name}[{index}]"
        computed = self._computed_operations
        return f"{reason}; sources have tensors that are not as loaded: {computed}" if computed else reason

    @cached_property
    def _computed_operations(self) -> str:
        operations = {operation for source in self.boxes for operation in source.map.computed.values()}
        return ", ".join(sorted(operations))


def intersect(sources: Sequence[PlacementMap], target: PlacementMap) -> Relocation:
    """Return the copies that fill the target's own tensors from the own tensors of the sources.

    An earlier source is preferred to a later one that has the same elements. All maps must be of the same weights.
    """
    pool = SourcePool(sources)
    wanted = _SourceBoxes(target)
    copies = Relocation([], [], [], [], [], [], (), ())
    uncovered = {name: f"computed on load by {operation}" for name, operation in target.computed.items()}
    merged_types: dict[CopyType, CopyType] = {}
    for tensor, rows in target.rows_of_checkpoint.items():
        name, tensor_type = target.checkpoint.names[tensor], target.checkpoint.type_of(tensor)
        owners = pool.owners(name, tensor_type)
        for row in rows:
            own = target.own.names[wanted.owns[row]]
            box, target_strides = wanted.bounds(row), wanted.strides(row)
            found, remaining = pool.overlaps(owners, box)
            for position, candidate, there, overlap in found:
                source = pool.boxes[position]
                source_strides = source.strides(candidate)
                sizes = tuple(end - begin for begin, end in overlap)
                unmerged = CopyType(tensor_type.itemsize, sizes, source_strides, target_strides)
                copy_type = merged_types.get(unmerged)
                if copy_type is None:
                    copy_type = merged_types[unmerged] = _merged(unmerged)
                copies.sources.append(position)
                copies.source_tensors.append(source.map.own.names[source.owns[candidate]])
                copies.source_offsets.append(source.offsets[candidate] + _distance(there, overlap, source_strides))
                copies.target_tensors.append(own)
                copies.target_offsets.append(wanted.offsets[row] + _distance(box, overlap, target_strides))
                copies.copy_types.append(copy_type)
            if remaining:
                uncovered.setdefault(own, pool.missing_reason(owners, name, remaining[0]))
    return replace(
        copies,
        uncovered=tuple(Uncovered(own, reason) for own, reason in uncovered.items()),
        unwritten=tuple(target.unwritten_elements),
    )


def _distance(box: Bounds, part: Bounds, strides: Sequence[int]) -> int:
    """Return the bytes from a box's first element to that of a part of it."""
    return sum((begin - first) * step for (first, _), (begin, _), step in zip(box, part, strides, strict=True))


def _merged(copy_type: CopyType) -> CopyType:
    """Return the same copy without dimensions of size 1, in the target's order, adjacent dimensions merged."""
    dims = sorted(
        (each for each in zip(*copy_type[1:], strict=True) if each[0] != 1), key=lambda each: (-each[2], -each[1])
    )
    result: list[tuple[int, int, int]] = []
    for size, source_stride, target_stride in dims:
        if result and result[-1][1:] == (size * source_stride, size * target_stride):
            result[-1] = (result[-1][0] * size, source_stride, target_stride)
        else:
            result.append((size, source_stride, target_stride))
    shape, source_strides, target_strides = zip(*result, strict=True) if result else ((), (), ())
    return CopyType(copy_type.itemsize, shape, source_strides, target_strides)
