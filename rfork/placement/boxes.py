"""Boxes of checkpoint tensors: what a target needs, which source sends it, and the layout of a box image. Pure.

A box image has one contiguous tensor per box, named ``NAME[0:512,0:64]``. Its layout depends on the boxes only, so all
instances that have them can serve it. This module does not import torch, so the planner may use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from rfork.placement.intersection import SourcePool
from rfork.placement.placement_map import (
    DECODING_ERRORS,
    BinaryFormat,
    BoxType,
    Column,
    PlacementMap,
    PlacementMapBuilder,
    TensorType,
)
from rfork.placement.strided import Bounds, contiguous_strides, joined

BOXES_FORMAT = BinaryFormat("list of boxes", b"rfork-boxes\n", 1, 256 << 20)
MAX_ENCODED_BOXES = 1 << 20
MAX_LINE_BYTES = 1 << 14
MAX_ITEMSIZE = 16
MAX_TENSOR_BYTES = 1 << 50


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
        index = ",".join(f"{begin}:{begin + size}" for begin, size in zip(self.start, self.sizes, strict=True))
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


class Division(NamedTuple):
    """Assignment of disjoint boxes to sources."""

    parts: tuple[tuple[Box, ...], ...]
    """Boxes of each source, in the order of the sources. May be empty for some."""
    missing: tuple[tuple[Box, str], ...]
    """Boxes that no source has, and the reason."""


def wanted_boxes(placement_map: PlacementMap) -> list[Box]:
    """Return the boxes that a loader with this map reads, at most one per checkpoint tensor, in the checkpoint's order.

    A box is the bounding box of the tensor's rows, or the complete tensor if its elements flow into computed values.
    """
    checkpoint = placement_map.checkpoint
    complete = {checkpoint.positions[name] for name in placement_map.read_completely}
    rows = placement_map.rows_of_checkpoint
    starts, positions = placement_map.starts.tolist(), placement_map.start_positions.tolist()
    types = placement_map.box_type_indices.tolist()
    found: list[Box] = []
    for tensor in sorted(complete.union(rows)):
        name, (dtype, itemsize, shape, _) = checkpoint.names[tensor], checkpoint.type_of(tensor)
        start, sizes = (0,) * len(shape), shape
        if tensor not in complete and shape:
            boxes = [
                (starts[positions[row] : positions[row + 1]], placement_map.box_types[types[row]].sizes)
                for row in rows[tensor]
            ]
            start = tuple(map(min, zip(*(begin for begin, _ in boxes), strict=True)))
            ends = (map(int.__add__, begin, sizes) for begin, sizes in boxes)
            sizes = tuple(end - first for first, end in zip(start, map(max, zip(*ends, strict=True)), strict=True))
        if 0 not in sizes:
            found.append(Box(name, dtype, itemsize, shape, start, sizes))
    return found


def divide(wanted: Sequence[Box], sources: Sequence[PlacementMap]) -> Division:
    """Assign each wanted element to one source that has it. Earlier sources are preferred.

    A part may consist of several rows of its source: adjacent elements of one source are one box.
    """
    pool = SourcePool(sources)
    parts: list[list[Box]] = [[] for _ in sources]
    missing: list[tuple[Box, str]] = []
    for box in wanted:
        if not box.byte_count:
            continue
        owners = pool.owners(box.tensor, box.tensor_type)
        found, remaining = pool.overlaps(owners, box.bounds)
        bounds_of: dict[int, list[Bounds]] = {}
        for overlap in found:
            bounds_of.setdefault(overlap.source, []).append(overlap.bounds)
        for source, bounds in bounds_of.items():
            parts[source].extend(map(box.part, joined(bounds)))
        for each in joined(remaining):
            missing.append((box.part(each), pool.missing_reason(owners, box.tensor, each)))
    return Division(tuple(map(tuple, parts)), tuple(missing))


def coverage(wanted: Sequence[Box], sources: Sequence[PlacementMap]) -> list[int]:
    """Return how many of the wanted bytes each source has. `wanted` has at most one box per tensor.

    An upper bound: rows that overlap in a tensor without being equal count twice. `divide` is exact, and much slower.
    """
    groups: dict[int, list[Box]] = {}
    for box in wanted:
        groups.setdefault(len(box.shape), []).append(box)
    totals = [0] * len(sources)
    for rank, boxes in groups.items():
        count = len(boxes)
        starts = np.array([box.start for box in boxes], dtype=np.int64).reshape(count, rank)
        ends = starts + np.array([box.sizes for box in boxes], dtype=np.int64).reshape(count, rank)
        itemsizes = np.array([box.itemsize for box in boxes], dtype=np.int64)
        elements = np.array([prod(box.sizes) for box in boxes], dtype=np.int64)
        types = [(box.tensor, box.tensor_type) for box in boxes]
        for index, source in enumerate(sources):
            found, begins, sizes = _rows_of(types, source, rank)
            common = np.minimum(begins + sizes, ends[found]) - np.maximum(begins, starts[found])
            covered = np.zeros(count, dtype=np.int64)
            np.add.at(covered, found, np.prod(np.maximum(common, 0), axis=1, dtype=np.int64))
            totals[index] += int(np.sum(np.minimum(covered, elements) * itemsizes))
    return totals


def _rows_of(
    tensors: Sequence[tuple[str, TensorType]], source: PlacementMap, rank: int
) -> tuple[Column, Column, Column]:
    """Return the different rows of a source for tensors of `rank` dimensions: position of the tensor, start, sizes."""
    checkpoint = source.checkpoint
    wanted = np.full(len(checkpoint) + 1, -1, dtype=np.int64)  # the last one is that of computed rows
    for position, (name, tensor_type) in enumerate(tensors):
        tensor = checkpoint.positions.get(name)
        if tensor is not None and checkpoint.type_of(tensor) == tensor_type:
            wanted[tensor] = position
    found = wanted[np.maximum(source.sources, -1)]
    rows = np.flatnonzero(found >= 0)
    of_rank = [(each.sizes if len(each.sizes) == rank else (0,) * rank) for each in source.box_types]
    sizes = np.array(of_rank, dtype=np.int64).reshape(len(of_rank), rank)[source.box_type_indices[rows]]
    begins = source.starts[source.start_positions[rows][:, None] + np.arange(rank)]
    found = found[rows]
    if np.any(np.bincount(found) > 1):  # one box in several own tensors
        different = np.unique(np.column_stack([found, begins, sizes]), axis=0)
        return different[:, 0], different[:, 1 : 1 + rank], different[:, 1 + rank :]
    return found, begins, sizes


def encode_boxes(boxes: Iterable[Box]) -> bytes:
    """Return the encoded boxes. Equal boxes have equal bytes."""
    lines = [json.dumps(box, separators=(",", ":")) + "\n" for box in boxes]
    return BOXES_FORMAT.packed("".join(lines).encode())


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
        _require_consistent(boxes)
    except DECODING_ERRORS as error:
        raise ValueError(f"invalid list of boxes: {error}") from error
    return boxes


def _decoded(line: bytes) -> Box:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a box of {len(line)} bytes; the limit is {MAX_LINE_BYTES}")
    tensor, dtype, itemsize, shape, start, sizes = json.loads(line)
    if not isinstance(tensor, str) or not isinstance(dtype, str):
        raise TypeError("a name that is no text")
    if not isinstance(shape, list) or not isinstance(start, list) or not isinstance(sizes, list):
        raise TypeError("sizes that are no list")
    if any(type(each) is not int for each in (itemsize, *shape, *start, *sizes)):
        raise TypeError("a size that is no integer")
    if not 0 < itemsize <= MAX_ITEMSIZE:
        raise ValueError(f"an item size of {itemsize}")
    for first, size, limit in zip(start, sizes, shape, strict=True):
        if size < 1:
            raise ValueError("a box without elements")
        if first < 0 or first + size > limit:
            raise ValueError("a box outside its tensor")
    if itemsize * prod(shape) > MAX_TENSOR_BYTES:
        raise ValueError(f"a tensor of more than {MAX_TENSOR_BYTES} bytes")
    return Box(tensor, dtype, itemsize, tuple(shape), tuple(start), tuple(sizes))


def _require_consistent(boxes: Sequence[Box]) -> None:
    """Raise ValueError if a box occurs twice, or if boxes of one tensor differ in its type."""
    types: dict[str, TensorType] = {}
    found: set[Box] = set()
    for box in boxes:
        tensor_type = box.tensor_type
        if types.setdefault(box.tensor, tensor_type) != tensor_type:
            raise ValueError(f"two types of the tensor {box.tensor}")
        if box in found:
            raise ValueError(f"two boxes {box.name}")
        found.add(box)


def box_map(boxes: Sequence[Box]) -> PlacementMap:
    """Return the map of a box image: its own tensors are the contiguous boxes.

    ``intersect([source], box_map(boxes))`` are the copies that gather the boxes from a source's own tensors. Raises
    ValueError if a box occurs twice, or if boxes of one tensor differ in its type.
    """
    _require_consistent(boxes)
    builder = PlacementMapBuilder()
    checkpoint: dict[str, int] = {}
    for box in boxes:
        tensor = checkpoint.get(box.tensor)
        if tensor is None:
            tensor = checkpoint[box.tensor] = builder.checkpoint.append(box.tensor, box.tensor_type)
        strides = tuple(step * box.itemsize for step in contiguous_strides(box.sizes))
        own = builder.own.append(box.name, TensorType(box.dtype, box.itemsize, box.sizes, strides))
        if box.byte_count:
            builder.append(tensor, box.start, own, 0, BoxType(box.sizes, strides))
    return builder.build()
