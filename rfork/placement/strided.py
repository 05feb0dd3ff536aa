"""Geometry of strided regions: nested loops over a checkpoint tensor and an own tensor at once. Pure.

A region is two offsets and a list of loops; each loop has a size and its step on both sides, in elements. Every
relocation by views is one. `boxes` divides it into boxes of both tensors, so that each loop runs along one dimension
of the checkpoint tensor and along one dimension of the own tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_BOXES = 1 << 16
"""Bound on the boxes of one region. Only interleaved reads come near it."""

Ints = npt.NDArray[np.int64]


class NotStridedError(ValueError):
    """The relocation cannot be described by a few strided boxes; the message is the reason."""


class Loop(NamedTuple):
    """One loop of a region."""

    size: int
    checkpoint_step: int
    own_step: int


class Region(NamedTuple):
    """Elements at both offsets plus every combination of the loops' steps."""

    checkpoint_offset: int
    own_offset: int
    loops: tuple[Loop, ...]

    @property
    def own_end(self) -> int:
        """Own offset after the last element."""
        return self.own_offset + _own_span(self.loops)

    def moved(self, loop: Loop, index: int, loops: tuple[Loop, ...]) -> Region:
        """Return the region with these loops that starts at an index of `loop`."""
        return Region(
            self.checkpoint_offset + index * loop.checkpoint_step, self.own_offset + index * loop.own_step, loops
        )


@lru_cache(maxsize=4096)
def _own_span(loops: tuple[Loop, ...]) -> int:
    return sum((loop.size - 1) * loop.own_step for loop in loops) + 1


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Grid:
    """Dimensions of one tensor, and the decomposition of element offsets into its indices."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.strides = tuple(strides)
        order = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -strides[dim])
        self.order = tuple(order)
        self.known_boxes: dict[tuple[tuple[Loop, ...], Grid], AlignedRegion] = {}
        """Last box of an own tensor with these loops in a checkpoint grid. Writes of one shape repeat per expert."""

    def index_of(self, offset: int) -> list[int] | None:
        """Return the index of the element at an offset; None if the tensor has no such element."""
        index = [0] * len(self.shape)
        for dim in self.order:
            stride = self.strides[dim]
            if stride < 1:
                return None
            index[dim], offset = divmod(offset, stride)
            if not 0 <= index[dim] < self.shape[dim]:
                return None
        return None if offset else index

    def dim_of(self, step: int) -> int | None:
        """Return the dimension along which a step moves; None if it moves along several."""
        for dim in self.order:
            if self.strides[dim] <= step:
                return dim if step % self.strides[dim] == 0 else None
        return None


class AlignedRegion(NamedTuple):
    """A region whose loops each run along one dimension of both tensors."""

    region: Region
    checkpoint_index: tuple[int, ...]
    checkpoint_dims: tuple[int, ...]
    """Dimension of each loop."""
    own_index: tuple[int, ...]
    own_dims: tuple[int, ...]


def merged(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Return the same loops without those of size 1, adjacent ones merged where both sides permit."""
    result: list[Loop] = []
    for loop in loops:
        if loop.size == 1:
            continue
        if result:
            outer = result[-1]
            if (
                outer.checkpoint_step == loop.size * loop.checkpoint_step
                and outer.own_step == loop.size * loop.own_step
            ):
                result[-1] = Loop(outer.size * loop.size, loop.checkpoint_step, loop.own_step)
                continue
        result.append(loop)
    return tuple(result)


def boxes(region: Region, checkpoint: Grid | None, own: Grid) -> list[AlignedRegion]:
    """Divide a region into boxes of both grids; without a checkpoint grid, into boxes of the own grid.

    Along the checkpoint's dimensions a box has no gaps; along the own dimensions it may have steps. Raises
    NotStridedError if an element is outside a grid, is read more than once, or if there are too many boxes.
    """
    if checkpoint is not None:
        known = own.known_boxes.get((region.loops, checkpoint))
        moved = _moved(known, region, checkpoint, own) if known is not None else None
        if moved is not None:
            return [moved]
    found = _divided(region, checkpoint, own)
    if checkpoint is not None and len(found) == 1:
        own.known_boxes[region.loops, checkpoint] = found[0]
    return found


def _moved(known: AlignedRegion, region: Region, checkpoint: Grid, own: Grid) -> AlignedRegion | None:
    """Return a box with the loops of another one at the offsets of a region; None if it does not fit there."""
    checkpoint_index = checkpoint.index_of(region.checkpoint_offset)
    own_index = own.index_of(region.own_offset)
    if checkpoint_index is None or own_index is None:
        return None
    loops = known.region.loops
    for loop, dim, own_dim in zip(loops, known.checkpoint_dims, known.own_dims, strict=True):
        last = loop.size - 1
        if checkpoint_index[dim] + last >= checkpoint.shape[dim]:
            return None
        if own_index[own_dim] + last * (loop.own_step // own.strides[own_dim]) >= own.shape[own_dim]:
            return None
    moved = Region(region.checkpoint_offset, region.own_offset, loops)
    return AlignedRegion(moved, tuple(checkpoint_index), known.checkpoint_dims, tuple(own_index), known.own_dims)


def _divided(region: Region, checkpoint: Grid | None, own: Grid) -> list[AlignedRegion]:
    found: list[AlignedRegion] = []
    pending = [Region(region.checkpoint_offset, region.own_offset, merged(region.loops))]
    while pending:
        current = pending.pop()
        divided: list[Region] | None = None
        checkpoint_index: list[int] = []
        checkpoint_dims: list[int] = []
        if checkpoint is not None:
            first = checkpoint.index_of(current.checkpoint_offset)
            if first is None:
                raise NotStridedError("reads outside the checkpoint tensor")
            checkpoint_index = first
            divided = _divide(current, checkpoint, checkpoint_index, True, checkpoint_dims)
        own_dims: list[int] = []
        own_index = own.index_of(current.own_offset)
        if own_index is None:
            raise NotStridedError("writes outside the tensor")
        if divided is None:
            divided = _divide(current, own, own_index, False, own_dims)
        if divided is None:
            found.append(
                AlignedRegion(
                    current, tuple(checkpoint_index), tuple(checkpoint_dims), tuple(own_index), tuple(own_dims)
                )
            )
        else:
            pending.extend(reversed(divided))
        if len(found) + len(pending) > MAX_BOXES:
            raise NotStridedError(f"has more than {MAX_BOXES} boxes")
    return found


def _divide(
    region: Region, grid: Grid, index: Sequence[int], is_checkpoint: bool, dims: list[int]
) -> list[Region] | None:
    """Append the dimension of each loop to `dims`, or return the regions into which the first misfit is divided."""
    assigned: set[int] = set()
    found: dict[int, int] = {}
    step_field = 1 if is_checkpoint else 2
    # The inner loop is assigned first, so that the outer one of two along a dimension is unrolled.
    for position in sorted(range(len(region.loops)), key=lambda each: region.loops[each][step_field]):
        loop = region.loops[position]
        step = loop[step_field]
        if step < 1:
            raise NotStridedError("is expanded")
        dim = grid.dim_of(step)
        before, after = region.loops[:position], region.loops[position + 1 :]
        if dim is not None:
            steps = step // grid.strides[dim]
            fits = index[dim] + (loop.size - 1) * steps < grid.shape[dim]
            if fits and dim not in assigned and (steps == 1 or not is_checkpoint):
                assigned.add(dim)
                found[position] = dim
                continue
            inner, rest = divmod(grid.shape[dim], steps)
            if not fits and not rest and 1 < inner < loop.size and index[dim] < steps and loop.size % inner == 0:
                outer = Loop(loop.size // inner, loop.checkpoint_step * inner, loop.own_step * inner)
                return [region._replace(loops=(*before, outer, loop._replace(size=inner), *after))]
        if loop.size > MAX_BOXES:
            raise NotStridedError(f"has more than {MAX_BOXES} boxes")
        return [region.moved(loop, each, before + after) for each in range(loop.size)]
    dims.extend(found[position] for position in range(len(region.loops)))
    return None


def overlapping_pairs(starts: Ints, stops: Ints) -> Iterator[tuple[int, int]]:
    """Yield the pairs of boxes (rows of half-open bounds per dimension) that overlap, the lower position first."""
    count, rank = starts.shape
    if count < 2:
        return
    if rank == 0:
        yield from ((first, second) for second in range(count) for first in range(second))
        return
    # The dimension with the most different starts leaves the fewest candidates.
    dim = max(range(rank), key=lambda each: len(np.unique(starts[:, each])))
    order = np.argsort(starts[:, dim], kind="stable")
    begins = starts[order, dim]
    ends = np.searchsorted(begins, stops[order, dim], side="left")
    candidates = np.maximum(ends - np.arange(count) - 1, 0)
    for position in np.flatnonzero(candidates):
        one = order[position]
        others = order[position + 1 : position + 1 + candidates[position]]
        overlap = np.all((starts[others] < stops[one]) & (starts[one] < stops[others]), axis=1)
        for other in others[overlap]:
            yield (int(one), int(other)) if one < other else (int(other), int(one))


Bounds = tuple[tuple[int, int], ...]
"""Half-open range per dimension."""


def common(one: Bounds, other: Bounds) -> Bounds | None:
    """Return the box that both boxes contain; None if it is empty."""
    result = []
    for (begin, end), (other_begin, other_end) in zip(one, other, strict=True):
        begin, end = max(begin, other_begin), min(end, other_end)
        if begin >= end:
            return None
        result.append((begin, end))
    return tuple(result)


def difference(box: Bounds, removed: Bounds) -> list[Bounds]:
    """Return disjoint boxes of everything in `box` that is not in `removed`, which lies within `box`."""
    left: list[Bounds] = []
    rest = list(box)
    for dim, ((begin, end), (removed_begin, removed_end)) in enumerate(zip(box, removed, strict=True)):
        if begin < removed_begin:
            left.append((*rest[:dim], (begin, removed_begin), *rest[dim + 1 :]))
        if removed_end < end:
            left.append((*rest[:dim], (removed_end, end), *rest[dim + 1 :]))
        rest[dim] = (removed_begin, removed_end)
    return left


def joined(parts: Sequence[Bounds]) -> list[Bounds]:
    """Return fewer disjoint boxes with the same elements: adjacent ones are joined, in the order of their starts."""
    result = sorted(parts)
    count = 0
    while len(result) > 1 and count != len(result):
        count = len(result)
        for dim in reversed(range(len(result[0]))):
            result = _joined_along(result, dim)
    return sorted(result)


def _joined_along(parts: Sequence[Bounds], dim: int) -> list[Bounds]:
    ordered = sorted(parts, key=lambda box: (box[:dim], box[dim + 1 :], box[dim]))
    result = [ordered[0]]
    for box in ordered[1:]:
        last = result[-1]
        if last[dim][1] == box[dim][0] and last[:dim] == box[:dim] and last[dim + 1 :] == box[dim + 1 :]:
            result[-1] = (*box[:dim], (last[dim][0], box[dim][1]), *box[dim + 1 :])
        else:
            result.append(box)
    return result
