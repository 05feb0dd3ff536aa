"""A small model in several layouts, and contents of its images in the coordinates of its checkpoint.

An element of a checkpoint tensor is a *cell* of 256 KiB, so an image of a few dozen of them has several chunks. Four
bytes represent the content of a cell. A chunk has four cells, so its content is as long as the digest that represents
it elsewhere in the simulation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rfork.image.chunks import MIB
from rfork.image.layout import Layout, TensorSpec
from rfork.placement.boxes import Box, box_map
from rfork.placement.intersection import intersect
from rfork.placement.placement_map import BoxType, PlacementMap, PlacementMapBuilder, TensorType
from rfork.placement.strided import contiguous_strides
from rfork.schema import Rank

CELL_BYTES = 1 << 18
CELLS_PER_CHUNK = MIB // CELL_BYTES
CONTENT_BYTES = 4
"""Bytes that represent the content of a cell."""
DTYPE = "cell"
REPLICATED = "norm"
"""Checkpoint tensor that all ranks have."""

Cells = npt.NDArray[np.uint32]
Indices = npt.NDArray[np.int64]


def checkpoint_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each checkpoint tensor, in cells."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (4, 2)}
    for layer in range(layers):
        shapes |= {f"{layer}.query": (4, 2), f"{layer}.key": (2, 2), f"{layer}.output": (2, 4)}
    return shapes | {REPLICATED: (3,)}


@cache
def _first_cells(layers: int) -> dict[str, int]:
    """Return the number of cells before each checkpoint tensor."""
    first, end = {}, 0
    for name, shape in checkpoint_shapes(layers).items():
        first[name] = end
        end += prod(shape)
    return first


@lru_cache(4096)
def checkpoint_cells(version: str, layers: int) -> Cells:
    """Return the content of all cells of a version; those of the first tensor are the same in all versions."""
    shapes = checkpoint_shapes(layers)
    parts = []
    for name, shape in shapes.items():
        source = "all" if name == "embed" else version
        for cell in range(prod(shape)):
            parts.append(hashlib.blake2b(f"{source}/{name}/{cell}".encode(), digest_size=CONTENT_BYTES).digest())
    return np.frombuffer(b"".join(parts), dtype=np.uint32)


@dataclass(frozen=True, eq=False)
class ImageShape:
    """Layout of an image, and the checkpoint cell that lies in each of its own."""

    layout: Layout
    placement_map: PlacementMap
    layers: int
    first_cells: dict[str, int]
    """Number of cells of the image before each own tensor."""
    checkpoint_indices: Indices

    def content(self, version: str) -> tuple[bytes, ...]:
        """Return the chunks of an image of this version."""
        return _content(self, version)

    @cached_property
    def cell_count(self) -> int:
        """Number of cells of the image."""
        return len(self.checkpoint_indices)

    def cells(self, memory: Sequence[bytes]) -> Cells:
        """Return the cells of an image's memory."""
        cells: Cells = np.frombuffer(b"".join(memory)[: self.cell_count * CONTENT_BYTES], dtype=np.uint32).copy()
        return cells


@lru_cache(4096)
def _content(shape: ImageShape, version: str) -> tuple[bytes, ...]:
    return chunks_of(checkpoint_cells(version, shape.layers)[shape.checkpoint_indices])


def chunks_of(cells: Cells) -> tuple[bytes, ...]:
    """Return the chunks with these cells."""
    return tuple(cells[begin : begin + CELLS_PER_CHUNK].tobytes() for begin in range(0, len(cells), CELLS_PER_CHUNK))


@dataclass(frozen=True)
class RankLayout:
    """One rank of one layout. `is_packed`: query and key are one tensor, and its loader only copies."""

    tp: int
    tp_size: int
    is_packed: bool = True

    @property
    def rank(self) -> Rank:
        """Its position in a replica."""
        return Rank(tp=self.tp, tp_size=self.tp_size)

    def shape(self, layers: int) -> ImageShape:
        """Return its image of a model with this many layers."""
        return _shape_of(self, layers)


@cache
def _shape_of(layout: RankLayout, layers: int) -> ImageShape:
    shapes = checkpoint_shapes(layers)
    builder = PlacementMapBuilder(only_copies=layout.is_packed, read_completely=[REPLICATED])
    indices = {name: builder.checkpoint.append(name, TensorType(DTYPE, CELL_BYTES, shapes[name])) for name in shapes}
    groups: list[tuple[str, list[str]]] = [("embed", ["embed"])]
    for layer in range(layers):
        query_and_key = [f"{layer}.query", f"{layer}.key"]
        groups += [(f"{layer}.qk", query_and_key)] if layout.is_packed else [(name, [name]) for name in query_and_key]
        groups.append((f"{layer}.output", [f"{layer}.output"]))
    groups.append((REPLICATED, [REPLICATED]))
    for own_name, names in groups:
        bounds = [_bounds(name, shapes[name], layout) for name in names]
        sizes = [tuple(end - begin for begin, end in each) for each in bounds]
        own_shape = (sum(each[0] for each in sizes), *sizes[0][1:])
        strides = tuple(step * CELL_BYTES for step in contiguous_strides(own_shape))
        own = builder.own.append(own_name, TensorType(DTYPE, CELL_BYTES, own_shape, strides))
        offset = 0
        for name, each, size in zip(names, bounds, sizes, strict=True):
            builder.append(indices[name], [begin for begin, _ in each], own, offset, BoxType(size, strides))
            offset += size[0] * strides[0]
    return _image_of(builder.build(), layers)


def _bounds(name: str, shape: tuple[int, ...], layout: RankLayout) -> list[tuple[int, int]]:
    """Return the part of a checkpoint tensor that a rank has: rows, or the columns of an output projection."""
    bounds = [(0, size) for size in shape]
    if name != REPLICATED:
        dim = 1 if name.endswith("output") else 0
        size = shape[dim] // layout.tp_size
        bounds[dim] = (layout.tp * size, (layout.tp + 1) * size)
    return bounds


@lru_cache(4096)
def box_shape(boxes: tuple[Box, ...], layers: int) -> ImageShape:
    """Return the image of boxes. It depends on the boxes, not on their order."""
    return _image_of(box_map(sorted(boxes)), layers)


def _image_of(placement_map: PlacementMap, layers: int) -> ImageShape:
    first, end, specs = {}, 0, []
    for index, name in enumerate(placement_map.own.names):
        count = prod(placement_map.own.type_of(index).shape)
        first[name] = end
        specs.append(TensorSpec(name, "uint8", (count * CELL_BYTES,), (1,), end * CELL_BYTES))
        end += count
    found = np.full(end, -1, dtype=np.int64)
    shapes, first_of_tensor = checkpoint_shapes(layers), _first_cells(layers)
    for row in placement_map:
        strides = contiguous_strides(shapes[row.checkpoint])
        there = first_of_tensor[row.checkpoint] + int(np.dot(row.start, strides)) + _grid(row.sizes, strides)
        here = first[row.own] + row.offset // CELL_BYTES + _grid(row.sizes, _in_cells(row.strides))
        found[here] = there
    assert found.min() >= 0
    return ImageShape(Layout(specs, end * CELL_BYTES), placement_map, layers, first, found)


def _in_cells(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(step // CELL_BYTES for step in strides)


def _grid(sizes: Sequence[int], strides: Sequence[int]) -> Indices:
    """Return the flat offset of each element of a box, in the order of its dimensions."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, step in zip(sizes, strides, strict=True):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return offsets


class CellCopy(NamedTuple):
    """The cells that one copy reads, and those that it writes."""

    read: Indices
    written: Indices


def cell_copies(source: ImageShape, target: ImageShape) -> list[CellCopy]:
    """Return the copies that fill those parts of a target that a source has."""
    found: list[CellCopy] = []
    for copy in intersect([source.placement_map], target.placement_map):
        _, shape, source_strides, target_strides = copy.copy_type
        read = source.first_cells[copy.source_tensor] + copy.source_offset // CELL_BYTES
        written = target.first_cells[copy.target_tensor] + copy.target_offset // CELL_BYTES
        found.append(
            CellCopy(read + _grid(shape, _in_cells(source_strides)), written + _grid(shape, _in_cells(target_strides)))
        )
    return found
