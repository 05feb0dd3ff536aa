"""Rows of a placement map for one own tensor: the writes to its memory, in order, reduced to disjoint boxes. Pure.

Later writes replace earlier ones. Where the remainder of an earlier write is no list of boxes, the complete tensor
counts as computed: a map never attributes elements to a checkpoint tensor that may not have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rfork.placement.checkpoint_view import CheckpointTensor
from rfork.placement.placement_map import BoxType, PlacementMapBuilder
from rfork.placement.strided import (
    AlignedRegion,
    Grid,
    Loop,
    NotStridedError,
    Region,
    boxes,
    common,
    contiguous_strides,
    difference,
    overlapping_pairs,
)

OVERLAPPING_WRITES = "overlapping strided writes"
WRITE_ACROSS_TENSORS = "write across several tensors"
WRITE_AS_ANOTHER_DTYPE = "write as another dtype"


class Write(NamedTuple):
    """One write to a storage. The region's own offset counts elements from the start of the storage."""

    tensor: CheckpointTensor | None
    operation: str
    """Operation that computed the elements; empty if they are those of a checkpoint tensor."""
    region: Region
    itemsize: int

    @property
    def byte_range(self) -> tuple[int, int]:
        """Bytes of the storage from the first element to the end of the last."""
        return self.region.own_offset * self.itemsize, self.region.own_end * self.itemsize

    def overlaps_any(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Return True if a byte of the write is in one of the ranges."""
        first, last = self.byte_range
        return any(begin < last and first < end for begin, end in ranges)


class OwnTensor(NamedTuple):
    """An own tensor. Offset and strides count elements, the offset from the start of the storage."""

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def byte_range(self) -> tuple[int, int]:
        """Bytes of the storage from the tensor's first element to the end of its last."""
        return self.offset * self.itemsize, (self.offset + _span(self.shape, self.strides)) * self.itemsize


class LostWrites(NamedTuple):
    """Names of checkpoint tensors with elements that were written to an own tensor but are not in its rows."""

    unfollowed: set[str]
    """Written in a form that is no list of boxes. The own tensor may still have the elements."""
    replaced: set[str]
    """Replaced by later writes."""


class _Written(NamedTuple):
    tensor: CheckpointTensor | None
    operation: str
    box: AlignedRegion


@lru_cache(maxsize=1024)
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of elements from a tensor's first one to the end of its last."""
    return 0 if 0 in shape else sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1


@lru_cache(maxsize=1024)
def _grid(shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Grid:
    return Grid(shape, contiguous_strides(shape) if strides is None else strides)


def append_rows(
    builder: PlacementMapBuilder, own: int, tensor: OwnTensor, writes: Sequence[Write], checkpoint: dict[str, int]
) -> LostWrites:
    """Append the rows of the own tensor at index `own`; `checkpoint` maps checkpoint tensors to their index.

    Return the writes of checkpoint elements that are not in the rows.
    """
    lost = LostWrites(set(), set())
    if 0 in tensor.shape:
        return lost
    grid = _grid(tensor.shape, tensor.strides)
    try:
        written = _disjoint(_boxes(tensor, grid, writes, lost), grid, lost)
    except NotStridedError as error:
        own_range = tensor.byte_range
        lost.unfollowed.update(
            write.tensor.name for write in writes if write.tensor is not None and write.overlaps_any([own_range])
        )
        operation = str(error)
        strides = tuple(step * tensor.itemsize for step in tensor.strides)
        builder.append_computed(operation, own, 0, BoxType(tensor.shape, strides))
        return lost
    for source, operation, box in written:
        region = box.region
        offset = region.own_offset * tensor.itemsize
        loops = region.loops
        if source is None:
            sizes = tuple(loop.size for loop in loops)
            steps = tuple(loop.own_step * tensor.itemsize for loop in loops)
            builder.append_computed(operation, own, offset, BoxType(sizes, steps))
            continue
        box_type = _box_type(len(source.shape), box.checkpoint_dims, loops, tensor.itemsize)
        builder.append(checkpoint[source.name], box.checkpoint_index, own, offset, box_type)
    return lost


@lru_cache(maxsize=4096)
def _box_type(rank: int, dims: tuple[int, ...], loops: tuple[Loop, ...], itemsize: int) -> BoxType:
    """Return the type of a box with these loops along dimensions of a checkpoint tensor."""
    sizes, strides = [1] * rank, [0] * rank
    for dim, loop in zip(dims, loops, strict=True):
        sizes[dim] = loop.size
        strides[dim] = loop.own_step * itemsize
    return BoxType(tuple(sizes), tuple(strides))


def _boxes(tensor: OwnTensor, grid: Grid, writes: Sequence[Write], lost: LostWrites) -> list[_Written]:
    """Return the boxes of the writes that concern the tensor, in their order.

    Raises NotStridedError, with the operation, if it is not known which of its elements a write concerns.
    """
    begin, end = tensor.byte_range
    found: list[_Written] = []
    for source, operation, region, itemsize in writes:
        if region.own_offset * itemsize >= end or region.own_end * itemsize <= begin:
            continue
        if itemsize != tensor.itemsize:
            raise NotStridedError(WRITE_AS_ANOTHER_DTYPE)
        local = region
        if tensor.offset:
            local = Region(region.checkpoint_offset, region.own_offset - tensor.offset, region.loops)
        if source is not None:
            try:
                divided = boxes(local, _grid(source.shape), grid)
            except NotStridedError as error:
                lost.unfollowed.add(source.name)
                source, operation = None, f"copy_ that {error}"
            else:
                found.extend(_Written(source, "", box) for box in divided)
                continue
        local = local._replace(loops=tuple(loop._replace(checkpoint_step=0) for loop in local.loops))
        try:
            found.extend(_Written(None, operation, box) for box in boxes(local, None, grid))
        except NotStridedError:
            raise NotStridedError(operation or WRITE_ACROSS_TENSORS) from None
    return found


def _disjoint(written: list[_Written], grid: Grid, lost: LostWrites) -> list[_Written]:
    """Return the boxes without the parts that later ones replace."""
    if len(written) < 2 or _are_apart(written):
        return written
    progressions = [_progressions(each.box, grid) for each in written]
    starts = np.array([[each.start for each in box] for box in progressions], dtype=np.int64)
    stops = np.array([[each[-1] + 1 for each in box] for box in progressions], dtype=np.int64)
    overlapping: dict[int, list[int]] = {}
    for earlier, later in overlapping_pairs(starts.reshape(len(written), -1), stops.reshape(len(written), -1)):
        overlapping.setdefault(earlier, []).append(later)
    result: list[_Written] = []
    for position, each in enumerate(written):
        parts = [each]
        for later in sorted(overlapping.get(position, ())):
            parts = [left for part in parts for left in _without(part, progressions[later], grid)]
        if each.tensor is not None and parts != [each]:
            lost.replaced.add(each.tensor.name)
        result.extend(parts)
    return result


def _are_apart(written: Sequence[_Written]) -> bool:
    """Return True if each box ends before the next one begins, in the order of their offsets."""
    ranges = sorted((each.box.region.own_offset, each.box.region.own_end) for each in written)
    return all(end <= begin for (_, end), (begin, _) in pairwise(ranges))


def _progressions(box: AlignedRegion, grid: Grid) -> list[range]:
    """Return the indices of a box along each own dimension."""
    result = [range(first, first + 1) for first in box.own_index]
    for dim, loop in zip(box.own_dims, box.region.loops, strict=True):
        step, first = loop.own_step // grid.strides[dim], box.own_index[dim]
        result[dim] = range(first, first + (loop.size - 1) * step + 1, step)
    return result


def _are_disjoint(one: range, other: range) -> bool:
    if one[-1] < other.start or other[-1] < one.start:
        return True
    if one.step == other.step:
        return (one.start - other.start) % one.step != 0
    fewer, more = (one, other) if len(one) < len(other) else (other, one)
    return not any(index in more for index in fewer)


def _without(written: _Written, removed: Sequence[range], grid: Grid) -> list[_Written]:
    """Return the parts of a box outside the indices `removed`, which are given for each own dimension."""
    indices = _progressions(written.box, grid)
    pairs = list(zip(indices, removed, strict=True))
    if any(_are_disjoint(kept, cut) for kept, cut in pairs):
        return [written]
    if all(kept == cut or (cut.step == 1 and kept.start in cut and kept[-1] in cut) for kept, cut in pairs):
        return []
    if any(each.step != 1 and len(each) > 1 for pair in pairs for each in pair):
        raise NotStridedError(OVERLAPPING_WRITES)
    bounds = tuple((each.start, each[-1] + 1) for each in indices)
    overlap = common(bounds, tuple((each.start, each[-1] + 1) for each in removed))
    assert overlap is not None  # not disjoint in any dimension
    return [written._replace(box=_part(written.box, part)) for part in difference(bounds, overlap)]


def _part(box: AlignedRegion, bounds: Sequence[tuple[int, int]]) -> AlignedRegion:
    """Return the part of a box, without steps, within bounds of its own indices."""
    checkpoint_offset, own_offset, loops = box.region
    checkpoint_index, own_index = list(box.checkpoint_index), list(box.own_index)
    kept: list[tuple[int, int, Loop]] = []
    for position, (dim, loop) in enumerate(zip(box.own_dims, loops, strict=True)):
        begin, end = bounds[dim]
        distance = begin - box.own_index[dim]
        checkpoint_offset += distance * loop.checkpoint_step
        own_offset += distance * loop.own_step
        own_index[dim] = begin
        checkpoint_dim = box.checkpoint_dims[position] if box.checkpoint_dims else 0
        if box.checkpoint_dims:
            checkpoint_index[checkpoint_dim] += distance
        if end - begin > 1:
            kept.append((checkpoint_dim, dim, loop._replace(size=end - begin)))
    return AlignedRegion(
        Region(checkpoint_offset, own_offset, tuple(loop for _, _, loop in kept)),
        tuple(checkpoint_index),
        tuple(dim for dim, _, _ in kept) if box.checkpoint_dims else (),
        tuple(own_index),
        tuple(dim for _, dim, _ in kept),
    )
