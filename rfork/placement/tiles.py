"""Boxes that the rows of sources tile: all boxes with one number of dimensions at once. Pure.

A box is tiled if one row covers it, or if rows divide it along one dimension, as tensor parallelism does. Most boxes
are. `SourcePool.overlaps` finds the parts of the others, box by box. This module does not import torch, so the planner
may use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rfork.placement.placement_map import Column, PlacementMap

MAX_BLOCK_BOXES = 1 << 16
"""Boxes whose candidates are in memory at once."""

Mask = npt.NDArray[np.bool_]


class BoxParts(NamedTuple):
    """Disjoint parts of boxes in columns: box by box, those of one box in the order of the sources and their rows."""

    boxes: Column
    """Position of the box."""
    sources: Column
    """Position of the source."""
    rows: Column
    starts: Column
    """First index, per dimension."""
    stops: Column
    """End of the indices, per dimension."""

    def only(self, selected: Column | Mask) -> BoxParts:
        """Return some of the parts."""
        return BoxParts(*(column[selected] for column in self))

    @classmethod
    def concatenated(cls, tiles: Sequence[BoxParts]) -> BoxParts:
        """Return the parts of several columns, one after another."""
        return cls(*(np.concatenate(columns) for columns in zip(*tiles, strict=True)))


class SourceRows:
    """Rows of one source for checkpoint tensors with one number of dimensions, found by tensor."""

    def __init__(self, source: PlacementMap, rank: int) -> None:
        boxes = source.row_boxes(rank)
        order = np.argsort(boxes.tensors, kind="stable")
        self._rows, self._starts, self._stops = boxes.rows[order], boxes.starts[order], boxes.stops[order]
        # The last count is that of tensor -1, which has no rows.
        self.counts: Column = np.bincount(boxes.tensors, minlength=len(source.checkpoint) + 1)
        """Number of rows of each checkpoint tensor."""
        self._firsts = np.cumsum(self.counts) - self.counts

    def overlaps(self, position: int, boxes: Column, tensors: Column, starts: Column, stops: Column) -> BoxParts:
        """Return the parts of boxes that are in this source, at a position among the sources, row by row.

        `tensors`: the checkpoint tensor of each box in this source, or -1.
        """
        counts = self.counts[tensors]
        pair = np.repeat(np.arange(len(boxes)), counts)
        row = np.arange(len(pair)) + np.repeat(self._firsts[tensors] - np.cumsum(counts) + counts, counts)
        begins, ends = np.maximum(starts[pair], self._starts[row]), np.minimum(stops[pair], self._stops[row])
        found = np.flatnonzero(np.all(begins < ends, axis=1))
        sources = np.full(len(found), position)
        return BoxParts(boxes[pair[found]], sources, self._rows[row[found]], begins[found], ends[found])


def tuples(matrix: Column) -> Iterator[tuple[int, ...]]:
    """Yield each row of a matrix as a tuple."""
    return zip(*matrix.T.tolist(), strict=True) if matrix.shape[1] else repeat((), len(matrix))


def tiles(starts: Column, stops: Column, sources: Sequence[SourceRows], tensors: Sequence[Column]) -> BoxParts:
    """Return the tiles of all boxes that are tiled; the others have none. An earlier source is preferred.

    `tensors`: the checkpoint tensor of each box in each source, or -1.
    """
    found: list[BoxParts] = []
    for first in range(0, len(starts), MAX_BLOCK_BOXES):
        found += _tiles_of(np.arange(first, min(first + MAX_BLOCK_BOXES, len(starts))), starts, stops, sources, tensors)
    if not found:
        none = np.zeros(0, np.int64)
        return BoxParts(none, none, none, starts[:0], stops[:0])
    result = BoxParts.concatenated(found)
    return result.only(np.argsort(result.boxes, kind="stable"))


def _tiles_of(
    boxes: Column, starts: Column, stops: Column, sources: Sequence[SourceRows], tensors: Sequence[Column]
) -> list[BoxParts]:
    first = boxes[0]
    missing = np.prod(stops[boxes] - starts[boxes], axis=1)
    """Elements of each box that no source so far has, or less if sources overlap."""
    found: list[BoxParts] = []
    pending: list[BoxParts] = []
    for position, (source, indices) in enumerate(zip(sources, tensors, strict=True)):
        overlaps = source.overlaps(position, boxes, indices[boxes], starts[boxes], stops[boxes])
        if not len(overlaps.boxes):
            continue
        pending.append(overlaps)
        np.subtract.at(missing, overlaps.boxes - first, np.prod(overlaps.stops - overlaps.starts, axis=1))
        if np.all(missing[boxes - first] > 0):
            continue
        candidates = BoxParts.concatenated(pending)
        complete = np.flatnonzero(missing[candidates.boxes - first] <= 0)
        tiled = complete[_tiled(candidates.only(complete), starts, stops)]
        found.append(candidates.only(tiled))
        is_tiled = np.zeros(len(missing), bool)
        is_tiled[candidates.boxes[tiled] - first] = True
        pending = [candidates.only(~is_tiled[candidates.boxes - first])]
        boxes = boxes[~is_tiled[boxes - first]]
    return found


def _tiled(parts: BoxParts, starts: Column, stops: Column) -> Column:
    """Return the positions of the parts that tile their box; none of a box that its parts do not tile."""
    order = np.argsort(parts.boxes, kind="stable")
    boxes, begins, ends = parts.boxes[order], parts.starts[order], parts.stops[order]
    is_cut = (begins != starts[boxes]) | (ends != stops[boxes])
    is_first = _changes(boxes)
    first_of = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    is_all = ~np.any(is_cut, axis=1)
    covering = order[is_first & is_all]

    # The other boxes need parts that differ from them along one dimension, the same for all parts.
    dims = np.argmax(is_cut, axis=1) if starts.shape[1] else np.zeros(len(boxes), dtype=np.int64)
    is_slice = (np.count_nonzero(is_cut, axis=1) == 1) & (dims == dims[first_of])
    others = np.flatnonzero(~is_all[first_of])
    low, high = begins[others, dims[others]], ends[others, dims[others]]
    # Of equal slices, the first source has the part: the sort is stable.
    along = np.lexsort((high, low, boxes[others]))
    others, low, high = others[along], low[along], high[along]
    is_different = _changes(boxes[others]) | _changes(low) | _changes(high)
    slices, low, high = others[is_different], low[is_different], high[is_different]
    boxes_of, dims_of = boxes[slices], dims[slices]
    is_next = ~_changes(boxes_of)
    is_last = np.append(~is_next[1:], True)[: len(slices)]
    before = np.where(is_next, np.roll(high, 1), starts[boxes_of, dims_of])
    is_gap = (low != before) | (is_last & (high != stops[boxes_of, dims_of]))

    is_tiled = np.ones(len(starts), dtype=bool)
    is_tiled[boxes[~is_slice]] = False
    is_tiled[boxes_of[is_gap]] = False
    positions: Column = np.sort(np.concatenate([covering, order[slices[is_tiled[boxes_of]]]]))
    return positions


def _changes(values: Column) -> Mask:
    """Return True where a value differs from the one before, and for the first one."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]
