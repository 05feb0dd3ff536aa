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

from rfork.gc_pause import gc_paused
from rfork.placement.placement_map import Column, PlacementMap, RowBoxes, TensorTable, TensorType
from rfork.placement.strided import Bounds, common, difference
from rfork.placement.tiles import BoxParts, SourceRows, tiles, tuples

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
        self._index: dict[int, tuple[int, Column, Column, Column]] = {}

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[int]]:
        """First indices, their positions and the types of all rows. Python reads elements faster from lists."""
        return self.map.starts.tolist(), self.map.start_positions.tolist(), self.map.box_type_indices.tolist()

    def bounds(self, row: int) -> Bounds:
        starts, positions, types = self._lists
        begin = starts[positions[row] : positions[row + 1]]
        return tuple(
            (first, first + size) for first, size in zip(begin, self.map.box_types[types[row]].sizes, strict=True)
        )

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
    bounds: Bounds


class MissingParts(NamedTuple):
    """Parts of one box that no source has."""

    box: int
    """Position of the box."""
    owners: Owners
    bounds: list[Bounds]


class FoundParts(NamedTuple):
    """Parts of boxes that sources have, each element once. An earlier source is preferred."""

    tiles: BoxParts
    """Those of boxes that are divided along one dimension at most."""
    others: BoxParts
    """Those of the other boxes."""
    missing: list[MissingParts]


class SourcePool:
    """Sources in the order of preference, and the search for boxes in them."""

    def __init__(self, sources: Sequence[PlacementMap]) -> None:
        self.boxes = [_SourceBoxes(source) for source in sources]

    def parts(self, checkpoint: TensorTable, tensors: Column, starts: Column, stops: Column) -> FoundParts:
        """Return the parts of boxes with one number of dimensions. `tensors`: the tensor of each in `checkpoint`."""
        rows = [SourceRows(source.map, starts.shape[1]) for source in self.boxes]
        indices = [source.map.checkpoint.indices_of(checkpoint)[tensors] for source in self.boxes]
        has_few = np.ones(len(tensors), dtype=bool)
        for source, index in zip(rows, indices, strict=True):
            has_few &= source.counts[index] < INDEXED_ROWS
        few = np.flatnonzero(has_few)
        found = tiles(starts[few], stops[few], rows, [index[few] for index in indices])
        found = found._replace(boxes=few[found.boxes])
        is_tiled = np.zeros(len(tensors), dtype=bool)
        is_tiled[found.boxes] = True
        overlaps: list[tuple[int, Overlap]] = []
        missing: list[MissingParts] = []
        for box in np.flatnonzero(~is_tiled).tolist():
            tensor = int(tensors[box])
            owners = self.owners(checkpoint.names[tensor], checkpoint.type_of(tensor))
            bounds = tuple(zip(starts[box].tolist(), stops[box].tolist(), strict=True))
            overlapping, remaining = self.overlaps(owners, bounds)
            overlaps.extend((box, each) for each in overlapping)
            if remaining:
                missing.append(MissingParts(box, owners, remaining))
        return FoundParts(found, _columns_of(overlaps, starts.shape[1]), missing)

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
                    found.append(Overlap(position, candidate, overlap))
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


def _columns_of(overlaps: Sequence[tuple[int, Overlap]], rank: int) -> BoxParts:
    """Return the overlaps of boxes, each with the position of its box, in columns."""
    locations = [(box, overlap.source, overlap.row) for box, overlap in overlaps]
    boxes, sources, rows = np.array(locations, dtype=np.int64).reshape(len(overlaps), 3).T
    bounds = np.array([overlap.bounds for _, overlap in overlaps], dtype=np.int64).reshape(len(overlaps), rank, 2)
    return BoxParts(boxes, sources, rows, bounds[:, :, 0], bounds[:, :, 1])


@gc_paused()
def intersect(sources: Sequence[PlacementMap], target: PlacementMap) -> Relocation:
    """Return the copies that fill the target's own tensors from the own tensors of the sources.

    An earlier source is preferred to a later one that has the same elements. All maps must be of the same weights.
    """
    pool = SourcePool(sources)
    order = _order_of_rows(target)
    copies: list[_Copies] = []
    missing: list[tuple[int, str, str]] = []
    for rank in sorted({len(box_type.sizes) for box_type in target.box_types}):
        boxes = target.row_boxes(rank)
        found = pool.parts(target.checkpoint, boxes.tensors, boxes.starts, boxes.stops)
        copies += (_copies_of(sources, target, boxes, parts) for parts in (found.tiles, found.others))
        for box, owners, bounds in found.missing:
            row, name = int(boxes.rows[box]), target.checkpoint.names[int(boxes.tensors[box])]
            reason = pool.missing_reason(owners, name, bounds[0])
            missing.append((int(order[row]), target.own.names[int(target.owns[row])], reason))
    uncovered = {name: f"computed on load by {operation}" for name, operation in target.computed.items()}
    for _, own, reason in sorted(missing):
        uncovered.setdefault(own, reason)
    return _relocation(
        copies,
        order,
        sources,
        target,
        tuple(Uncovered(own, reason) for own, reason in uncovered.items()),
    )


def _order_of_rows(target: PlacementMap) -> Column:
    """Return the position of each row among the copies: rows of one checkpoint tensor follow each other."""
    rows = np.flatnonzero(target.sources >= 0)
    tensors = target.sources[rows]
    first = np.zeros(len(target.checkpoint), dtype=np.int64)
    first[tensors[::-1]] = rows[::-1]
    order = np.zeros(len(target), dtype=np.int64)
    order[rows[np.argsort(first[tensors], kind="stable")]] = np.arange(len(rows))
    return order


class _Copies(NamedTuple):
    """Copies in columns."""

    sources: Column
    source_owns: Column
    """Index of the source's own tensor."""
    source_offsets: Column
    rows: Column
    """Row of the target."""
    target_offsets: Column
    copy_types: list[CopyType]


def _copies_of(sources: Sequence[PlacementMap], target: PlacementMap, boxes: RowBoxes, parts: BoxParts) -> _Copies:
    """Return the copies of parts of the target's boxes."""
    rows = boxes.rows[parts.boxes]
    owns, offsets = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    source_strides: list[tuple[int, ...]] = [()] * len(rows)
    for position, source in enumerate(sources):
        of_source = np.flatnonzero(parts.sources == position)
        source_rows = parts.rows[of_source]
        owns[of_source] = source.owns[source_rows]
        offsets[of_source] = _offsets(source, source_rows, parts.starts[of_source])
        types = source.box_type_indices[source_rows].tolist()
        for index, box_type in zip(of_source.tolist(), types, strict=True):
            source_strides[index] = source.box_types[box_type].strides
    itemsizes = [each.itemsize for each in target.checkpoint.types]
    type_indices = np.array(target.checkpoint.type_indices, dtype=np.int64)[target.sources[rows]]
    merged: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], CopyType] = {}
    copy_types: list[CopyType] = []
    for key in zip(
        type_indices.tolist(),
        target.box_type_indices[rows].tolist(),
        tuples(parts.stops - parts.starts),
        source_strides,
        strict=True,
    ):
        copy_type = merged.get(key)
        if copy_type is None:
            tensor_type, box_type, sizes, strides = key
            unmerged = CopyType(itemsizes[tensor_type], sizes, strides, target.box_types[box_type].strides)
            copy_type = merged[key] = _merged(unmerged)
        copy_types.append(copy_type)
    return _Copies(parts.sources, owns, offsets, rows, _offsets(target, rows, parts.starts), copy_types)


def _offsets(placement_map: PlacementMap, rows: Column, starts: Column) -> Column:
    """Return the byte offsets in own tensors of the elements of rows at indices `starts` of the checkpoint tensors."""
    rank = starts.shape[1]
    of_rank = [(each.strides if len(each.strides) == rank else (0,) * rank) for each in placement_map.box_types]
    strides = np.array(of_rank, dtype=np.int64).reshape(len(of_rank), rank)[placement_map.box_type_indices[rows]]
    begins = placement_map.starts[placement_map.start_positions[rows][:, None] + np.arange(rank)]
    offsets: Column = placement_map.offsets[rows] + np.sum((starts - begins) * strides, axis=1)
    return offsets


def _relocation(
    copies: Sequence[_Copies],
    order: Column,
    sources: Sequence[PlacementMap],
    target: PlacementMap,
    uncovered: tuple[Uncovered, ...],
) -> Relocation:
    """Return all copies in the order of the target's rows."""
    none = np.zeros(0, dtype=np.int64)
    along = np.argsort(order[np.concatenate([none, *(each.rows for each in copies)])], kind="stable")
    positions, owns, offsets, rows, target_offsets = (
        np.concatenate([none, *(each[field] for each in copies)])[along].tolist() for field in range(5)
    )
    copy_types = [copy_type for each in copies for copy_type in each.copy_types]
    target_owns = target.owns.tolist()
    return Relocation(
        positions,
        [sources[position].own.names[own] for position, own in zip(positions, owns, strict=True)],
        offsets,
        [target.own.names[target_owns[row]] for row in rows],
        target_offsets,
        [copy_types[index] for index in along.tolist()],
        uncovered,
        tuple(target.unwritten_elements),
    )


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
