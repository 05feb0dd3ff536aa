"""Boxes of checkpoint tensors: what a target needs, which source sends it, and the layout of a box image. Pure.

A box image has one contiguous tensor per box, named ``NAME[0:512,0:64]``. Its layout depends on the boxes only, so all
instances that have them can serve it. This module does not import torch, so the planner may use it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from math import prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from rfork.gc_pause import gc_paused
from rfork.placement.intersection import SourcePool
from rfork.placement.placement_map import (
    DECODING_ERRORS,
    BinaryFormat,
    BoxType,
    Column,
    PlacementMap,
    PlacementMapBuilder,
    TensorTable,
    TensorType,
)
from rfork.placement.strided import Bounds, contiguous_strides, joined
from rfork.placement.tiles import BoxParts, tuples

BOXES_FORMAT = BinaryFormat("list of boxes", b"rfork-boxes\n", 1, 256 << 20)
MAX_ENCODED_BOXES = 1 << 20
MAX_LINE_BYTES = 1 << 14
MAX_ITEMSIZE = 16
MAX_TENSOR_BYTES = 1 << 50
_JSON_DECODER = json.JSONDecoder()


class Box(NamedTuple):
    """A box of one checkpoint tensor."""

    tensor: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    """Shape of the checkpoint tensor."""
    start: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the box's tensor in a box image."""
        index = ",".join([f"{begin}:{begin + size}" for begin, size in zip(self.start, self.sizes, strict=True)])
        return f"{self.tensor}[{index}]"

    @property
    def byte_count(self) -> int:
        """Number of bytes of its elements."""
        return self.itemsize * prod(self.sizes)

    @property
    def is_complete(self) -> bool:
        """True if it is the complete checkpoint tensor."""
        return self.sizes == self.shape

    @property
    def is_contiguous(self) -> bool:
        """True if its elements are adjacent in the checkpoint tensor."""
        cut = next((dim for dim, size in enumerate(self.sizes) if size != 1), len(self.sizes))
        return self.sizes[cut + 1 :] == self.shape[cut + 1 :]

    @property
    def bounds(self) -> Bounds:
        """Half-open range per dimension."""
        return tuple((begin, begin + size) for begin, size in zip(self.start, self.sizes, strict=True))

    @property
    def tensor_type(self) -> TensorType:
        """Type of the checkpoint tensor."""
        return TensorType(self.dtype, self.itemsize, self.shape)

    def part(self, bounds: Bounds) -> Box:
        """Return another box of the same tensor."""
        return self._replace(
            start=tuple(begin for begin, _ in bounds), sizes=tuple(end - begin for begin, end in bounds)
        )


BOX_ITEMSIZE, BOX_SHAPE, BOX_START, BOX_SIZES = map(Box._fields.index, ("itemsize", "shape", "start", "sizes"))
"""Positions of fields."""


class Division(NamedTuple):
    """Assignment of disjoint boxes to sources."""

    parts: tuple[tuple[Box, ...], ...]
    """Boxes of each source, in the order of the sources. May be empty for some."""
    missing: tuple[tuple[Box, str], ...]
    """Boxes that no source has, and the reason."""


@gc_paused()
def wanted_boxes(placement_map: PlacementMap) -> list[Box]:
    """Return the boxes that a loader with this map reads, at most one per checkpoint tensor, in the checkpoint's order.

    A box is the bounding box of the tensor's rows, or the complete tensor if its elements flow into computed values.
    """
    checkpoint = placement_map.checkpoint
    is_complete = np.zeros(len(checkpoint), dtype=bool)
    is_complete[[checkpoint.positions[name] for name in placement_map.read_completely]] = True
    bounds: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for rank in {len(each.shape) for each in checkpoint.types}:
        boxes = placement_map.row_boxes(rank)
        order = np.argsort(boxes.tensors, kind="stable")
        order = order[~is_complete[boxes.tensors[order]]]
        tensors = boxes.tensors[order]
        first = np.flatnonzero(np.concatenate([[True], tensors[1:] != tensors[:-1]])[: len(tensors)])
        if len(first):
            starts = np.minimum.reduceat(boxes.starts[order], first, axis=0)
            sizes = np.maximum.reduceat(boxes.stops[order], first, axis=0) - starts
            bounds.update(zip(tensors[first].tolist(), zip(tuples(starts), tuples(sizes), strict=True), strict=True))
    for tensor in np.flatnonzero(is_complete).tolist():
        shape = checkpoint.type_of(tensor).shape
        bounds[tensor] = (0,) * len(shape), shape
    names, types, indices = checkpoint.names, checkpoint.types, checkpoint.type_indices
    return [
        Box(names[tensor], *types[indices[tensor]][:3], *bounds[tensor])
        for tensor in sorted(bounds)
        if 0 not in bounds[tensor][1]
    ]


@gc_paused()
def divide(wanted: Sequence[Box], sources: Sequence[PlacementMap]) -> Division:
    """Assign each wanted element to one source that has it. Earlier sources are preferred.

    A part may consist of several rows of its source: adjacent elements of one source are one box.
    """
    pool = SourcePool(sources)
    parts: list[_OrderedBoxes] = [_OrderedBoxes([], []) for _ in sources]
    missing: list[tuple[int, Box, str]] = []
    for group in _by_rank(wanted):
        found = pool.parts(group.table, np.arange(len(group.boxes)), group.starts, group.stops)
        _add_tiles(parts, group, found.tiles)
        _add_parts(parts, group, found.others)
        for box, owners, bounds in found.missing:
            for each in joined(bounds):
                reason = pool.missing_reason(owners, group.boxes[box].tensor, each)
                missing.append((int(group.positions[box]), group.boxes[box].part(each), reason))
    missing.sort(key=itemgetter(0))
    return Division(tuple(part.in_order() for part in parts), tuple((box, reason) for _, box, reason in missing))


class _OrderedBoxes(NamedTuple):
    """Boxes, and the positions of the wanted ones that they are part of."""

    positions: list[int]
    boxes: list[Box]

    def in_order(self) -> tuple[Box, ...]:
        """Return the boxes in the order of the wanted ones."""
        order: list[int] = np.argsort(np.array(self.positions, dtype=np.int64), kind="stable").tolist()
        return tuple(map(self.boxes.__getitem__, order))


class _BoxGroup(NamedTuple):
    """Boxes with elements, of tensors with one number of dimensions, in columns."""

    boxes: list[Box]
    positions: Column
    """Position of each box among all."""
    table: TensorTable
    """Tensor of each box."""
    starts: Column
    stops: Column


def _by_rank(boxes: Sequence[Box]) -> Iterator[_BoxGroup]:
    """Yield the boxes that have elements."""
    groups: dict[int, list[int]] = {}
    for position, box in enumerate(boxes):
        if 0 not in box.sizes:
            groups.setdefault(len(box.shape), []).append(position)
    for rank, positions in groups.items():
        found = [boxes[position] for position in positions]
        starts = _matrix(found, BOX_START, rank)
        types: dict[tuple[object, ...], TensorType] = {}  # by dtype, item size and shape
        table = TensorTable(
            map(itemgetter(0), found),
            (types.get(box[1:4]) or types.setdefault(box[1:4], box.tensor_type) for box in found),
        )
        stops = starts + _matrix(found, BOX_SIZES, rank)
        yield _BoxGroup(found, np.array(positions, dtype=np.int64), table, starts, stops)


def _add_tiles(parts: Sequence[_OrderedBoxes], group: _BoxGroup, tiles: BoxParts) -> None:
    """Add tiles of a group's boxes to the parts of their sources. Adjacent tiles are joined."""
    tiles = tiles.only(np.lexsort((*tiles.starts.T[::-1], tiles.boxes, tiles.sources)))
    is_adjacent = (tiles.boxes[1:] == tiles.boxes[:-1]) & (tiles.sources[1:] == tiles.sources[:-1])
    is_adjacent &= np.any(tiles.starts[1:] == tiles.stops[:-1], axis=1)
    first = np.concatenate([[True], ~is_adjacent])[: len(tiles.boxes)]
    last = np.concatenate([~is_adjacent, [True]])[: len(tiles.boxes)]
    indices, starts, stops = tiles.boxes[first], tiles.starts[first], tiles.stops[last]
    is_complete = np.all((starts == group.starts[indices]) & (stops == group.stops[indices]), axis=1)
    limits = np.searchsorted(tiles.sources[first], np.arange(len(parts) + 1)).tolist()
    for part, (begin, end) in zip(parts, pairwise(limits), strict=True):
        boxes = [group.boxes[index] for index in indices[begin:end].tolist()]
        cut = begin + np.flatnonzero(~is_complete[begin:end])
        bounds = zip(tuples(starts[cut]), tuples(stops[cut] - starts[cut]), strict=True)
        for index, start_sizes in zip((cut - begin).tolist(), bounds, strict=True):
            boxes[index] = Box._make(boxes[index][:BOX_START] + start_sizes)
        part.positions.extend(group.positions[indices[begin:end]].tolist())
        part.boxes.extend(boxes)


def _add_parts(parts: Sequence[_OrderedBoxes], group: _BoxGroup, found: BoxParts) -> None:
    """Add any disjoint parts of a group's boxes to the parts of their sources. Adjacent ones are joined."""
    bounds: dict[tuple[int, int], list[Bounds]] = {}
    for box, source, start, stop in zip(
        found.boxes.tolist(), found.sources.tolist(), found.starts.tolist(), found.stops.tolist(), strict=True
    ):
        bounds.setdefault((box, source), []).append(tuple(zip(start, stop, strict=True)))
    for (box, source), all_bounds in bounds.items():
        boxes = [group.boxes[box].part(each) for each in joined(all_bounds)]
        parts[source].positions.extend([int(group.positions[box])] * len(boxes))
        parts[source].boxes.extend(boxes)


def coverage(wanted: Sequence[Box], sources: Sequence[PlacementMap]) -> list[int]:
    """Return how many of the wanted bytes each source has. `wanted` has at most one box per tensor.

    An upper bound: rows that overlap in a tensor without being equal count twice. `divide` is exact, and slower.
    """
    totals = [0] * len(sources)
    for group in _by_rank(wanted):
        itemsizes = np.array([box.itemsize for box in group.boxes], dtype=np.int64)
        elements = np.prod(group.stops - group.starts, axis=1)
        for position, source in enumerate(sources):
            found, begins, ends = _different_rows(source, group.table, group.starts.shape[1])
            common = np.minimum(ends, group.stops[found]) - np.maximum(begins, group.starts[found])
            covered = np.zeros(len(group.boxes), dtype=np.int64)
            np.add.at(covered, found, np.prod(np.maximum(common, 0), axis=1, dtype=np.int64))
            totals[position] += int(np.sum(np.minimum(covered, elements) * itemsizes))
    return totals


def _different_rows(source: PlacementMap, table: TensorTable, rank: int) -> tuple[Column, Column, Column]:
    """Return the different rows of a source for tensors of `rank` dimensions: position in `table`, start and stop."""
    boxes = source.row_boxes(rank)
    positions = table.indices_of(source.checkpoint)[boxes.tensors]
    found = positions >= 0
    positions, starts, stops = positions[found], boxes.starts[found], boxes.stops[found]
    if np.any(np.bincount(positions) > 1):  # one box in several own tensors
        different = np.unique(np.column_stack([positions, starts, stops]), axis=0)
        return different[:, 0], different[:, 1 : 1 + rank], different[:, 1 + rank :]
    return positions, starts, stops


def encode_boxes(boxes: Iterable[Box]) -> bytes:
    """Return the encoded boxes. Equal boxes have equal bytes."""
    known: dict[tuple[object, ...], str] = {}
    lines: list[str] = []
    for box in boxes:
        rest = known.get(box[1:])  # few differ: the layers of a model repeat
        if rest is None:
            rest = known[box[1:]] = json.dumps(box[1:], separators=(",", ":"))[1:]
        lines.append(f"[{json.dumps(box.tensor)},{rest}\n")
    return BOXES_FORMAT.packed("".join(lines).encode())


@gc_paused()
def decode_boxes(data: bytes) -> tuple[Box, ...]:
    """Return the boxes that were encoded.

    Raises ValueError if the bytes are no valid boxes of this format version, or if the boxes exceed a limit. Each box
    has elements and is within its tensor; no box occurs twice, and all boxes of a tensor agree on its type.
    """
    body = BOXES_FORMAT.unpacked(data)
    if body.count(b"\n") > MAX_ENCODED_BOXES:
        raise ValueError(f"more than {MAX_ENCODED_BOXES} boxes")
    if body and not body.endswith(b"\n"):
        raise ValueError("invalid list of boxes: truncated")
    try:
        # Each line is limited and decoded by itself, so invalid text never becomes millions of objects.
        boxes = tuple(_decoded(line) for line in body.splitlines())
        _require_valid(boxes)
        _require_consistent(boxes)
    except DECODING_ERRORS as error:
        raise ValueError(f"invalid list of boxes: {error}") from error
    return boxes


def _decoded(line: bytes) -> Box:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a box of {len(line)} bytes; the limit is {MAX_LINE_BYTES}")
    text = line.decode()
    (tensor, dtype, itemsize, shape, start, sizes), end = _JSON_DECODER.raw_decode(text)
    if end != len(text):
        raise ValueError("text after a box")
    if not isinstance(tensor, str) or not isinstance(dtype, str):
        raise TypeError("a name that is no text")
    if not isinstance(shape, list) or not isinstance(start, list) or not isinstance(sizes, list):
        raise TypeError("sizes that are no list")
    if not len(shape) == len(start) == len(sizes):
        raise ValueError("a box with other dimensions than its tensor")
    return Box(tensor, dtype, itemsize, tuple(shape), tuple(start), tuple(sizes))


def _require_valid(boxes: Sequence[Box]) -> None:
    """Raise TypeError, ValueError or OverflowError if a box has no elements, is outside its tensor, or is too large."""
    numbers = (map(itemgetter(field), boxes) for field in (BOX_SHAPE, BOX_START, BOX_SIZES))
    if not {type(box.itemsize) for box in boxes}.union(*(map(type, chain(*each)) for each in numbers)) <= {int}:
        raise TypeError("a size that is no integer")
    for box in boxes:
        if not 0 < box.itemsize <= MAX_ITEMSIZE:
            raise ValueError(f"an item size of {box.itemsize}")
    for rank in {len(box.shape) for box in boxes}:
        of_rank = [box for box in boxes if len(box.shape) == rank]
        shapes, starts, sizes = (_matrix(of_rank, field, rank) for field in (BOX_SHAPE, BOX_START, BOX_SIZES))
        if np.any(sizes < 1):
            raise ValueError("a box without elements")
        if np.any(starts < 0) or np.any(sizes > shapes) or np.any(starts > shapes - sizes):
            raise ValueError("a box outside its tensor")
        # Floats, which do not overflow, are exact up to more than the limit.
        itemsizes = np.fromiter(map(itemgetter(BOX_ITEMSIZE), of_rank), np.float64, len(of_rank))
        if np.any(np.prod(shapes, axis=1, dtype=np.float64) * itemsizes > MAX_TENSOR_BYTES):
            raise ValueError(f"a tensor of more than {MAX_TENSOR_BYTES} bytes")


def _matrix(boxes: Sequence[Box], field: int, rank: int) -> Column:
    """Return a field of boxes with `rank` dimensions, a row for each box."""
    values = np.fromiter(chain.from_iterable(map(itemgetter(field), boxes)), np.int64, len(boxes) * rank)
    return values.reshape(len(boxes), rank)


def _require_consistent(boxes: Sequence[Box]) -> None:
    """Raise ValueError if a box occurs twice, or if boxes of one tensor differ in its type."""
    types: dict[str, tuple[object, ...]] = {}
    for box in boxes:
        tensor_type = box[1:4]  # dtype, item size and shape
        if types.setdefault(box.tensor, tensor_type) != tensor_type:
            raise ValueError(f"two types of the tensor {box.tensor}")
    if len(set(boxes)) != len(boxes):
        ((box, _),) = Counter(boxes).most_common(1)
        raise ValueError(f"two boxes {box.name}")


@gc_paused()
def box_map(boxes: Sequence[Box]) -> PlacementMap:
    """Return the map of a box image: its own tensors are the contiguous boxes.

    ``intersect([source], box_map(boxes))`` are the copies that gather the boxes from a source's own tensors. Raises
    ValueError if a box occurs twice, or if boxes of one tensor differ in its type.
    """
    _require_consistent(boxes)
    builder = PlacementMapBuilder()
    checkpoint: dict[str, int] = {}
    types: dict[tuple[object, ...], tuple[TensorType, BoxType]] = {}
    for box in boxes:
        tensor = checkpoint.get(box.tensor)
        if tensor is None:
            tensor = checkpoint[box.tensor] = builder.checkpoint.append(box.tensor, box.tensor_type)
        key = (box.dtype, box.itemsize, box.sizes)
        known = types.get(key)
        if known is None:
            strides = tuple(step * box.itemsize for step in contiguous_strides(box.sizes))
            known = types[key] = TensorType(*key, strides), BoxType(box.sizes, strides)
        own_type, box_type = known
        own = builder.own.append(box.name, own_type)
        if 0 not in box.sizes:
            builder.append(tensor, box.start, own, 0, box_type)
    return builder.build()
