"""Parts of boxes found for all at once are those that a search box by box finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rfork.placement import tiles as tiles_module
from rfork.placement.boxes import Box, Division, divide, wanted_boxes
from rfork.placement.intersection import INDEXED_ROWS, intersect
from rfork.placement.placement_map import BoxType, MapRow, PlacementMap, PlacementMapBuilder, TensorType
from rfork.placement.strided import Bounds, common, contiguous_strides, difference, joined
from rfork.placement.tiles import SourceRows, tiles
from tests.unit.placement.small_model import LAYOUTS, map_of_rank

ITEMSIZE = 2


class Found(NamedTuple):
    """Part of a box that a row of a source has."""

    source: int
    row: MapRow
    bounds: Bounds


def bounds_of(row: MapRow | Box) -> Bounds:
    return tuple((begin, begin + size) for begin, size in zip(row.start, row.sizes, strict=True))


def search(
    name: str, shape: tuple[int, ...], box: Bounds, sources: Sequence[PlacementMap]
) -> tuple[list[Found], list[Bounds]]:
    """Return the parts of one box, row by row, and what is missing."""
    found: list[Found] = []
    remaining = [box]
    for position, source in enumerate(sources):
        tensor = source.checkpoint.positions.get(name)
        if tensor is None or source.checkpoint.type_of(tensor).shape != shape:
            continue
        for row in source:
            if row.checkpoint != name:
                continue
            left: list[Bounds] = []
            for part in remaining:
                overlap = common(part, bounds_of(row))
                if overlap is None:
                    left.append(part)
                else:
                    left += difference(part, overlap)
                    found.append(Found(position, row, overlap))
            remaining = left
    return found, remaining


def divided(wanted: Sequence[Box], sources: Sequence[PlacementMap]) -> tuple[list[list[Box]], list[Box]]:
    """Return the division of boxes among sources, box by box."""
    parts: list[list[Box]] = [[] for _ in sources]
    missing: list[Box] = []
    for box in wanted:
        found, remaining = search(box.tensor, box.shape, box.bounds, sources)
        for position in range(len(sources)):
            parts[position] += map(box.part, joined([each.bounds for each in found if each.source == position]))
        missing += map(box.part, joined(remaining))
    return parts, missing


def assert_divided(division: Division, wanted: Sequence[Box], sources: Sequence[PlacementMap]) -> None:
    parts, missing = divided(wanted, sources)
    assert parts == [list(part) for part in division.parts]
    assert missing == [box for box, _ in division.missing]


Copy = tuple[int, str, int, str, int, int]
"""Source, its own tensor and offset, the target's own tensor and offset, and bytes."""


def copied(sources: Sequence[PlacementMap], target: PlacementMap) -> list[Copy]:
    """Return the copies that fill a target, row by row."""
    copies: list[Copy] = []
    rows = [row for row in target if row.checkpoint]
    first = {name: position for position, name in reversed(list(enumerate(row.checkpoint for row in rows)))}
    for row in sorted(rows, key=lambda each: first[each.checkpoint]):
        shape = target.checkpoint.type_of(target.checkpoint.positions[row.checkpoint]).shape
        for source, there, bounds in search(row.checkpoint, shape, bounds_of(row), sources)[0]:
            begins = [begin for begin, _ in bounds]
            copies.append((
                source,
                there.own,
                there.offset + int(np.dot(np.subtract(begins, there.start), there.strides)),
                row.own,
                row.offset + int(np.dot(np.subtract(begins, row.start), row.strides)),
                ITEMSIZE * int(np.prod([end - begin for begin, end in bounds])),
            ))  # fmt: skip
    return copies


def assert_copied(sources: Sequence[PlacementMap], target: PlacementMap) -> None:
    found = [(*copy[:5], copy.byte_count) for copy in intersect(sources, target)]
    assert copied(sources, target) == found


@st.composite
def rows_of_layout(draw: st.DrawFn, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, Bounds]]:
    """Return the boxes of one rank, by tensor: slices of tensor parallelism, some missing, repeated or displaced."""
    rows: list[tuple[int, Bounds]] = []
    size = draw(st.sampled_from([1, 1, 2, 4]))
    rank = draw(st.integers(0, size - 1))
    for tensor, shape in enumerate(shapes):
        dim = draw(st.integers(0, len(shape)))
        part = 8 // size
        bounds = tuple((rank * part, rank * part + part) if each == dim else (0, 8) for each in range(len(shape)))
        rows += [(tensor, bounds)] * draw(st.sampled_from([0, 1, 1, 1, 1, 1, 1, 2]))
        for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 2]))):
            limits = st.integers(0, 7).flatmap(lambda begin: st.tuples(st.just(begin), st.integers(begin + 1, 8)))
            rows.append((tensor, draw(st.tuples(*[limits] * len(shape)))))
    return draw(st.permutations(rows)) if draw(st.booleans()) else rows


def map_of(rows: Sequence[tuple[int, Bounds]], shapes: Sequence[tuple[int, ...]]) -> PlacementMap:
    """Return a map with one own tensor per row, each with a gap after every element."""
    builder = PlacementMapBuilder()
    for tensor, shape in enumerate(shapes):
        builder.checkpoint.append(f"tensor.{tensor}", TensorType("bfloat16", ITEMSIZE, shape))
    for position, (tensor, bounds) in enumerate(rows):
        sizes = tuple(end - begin for begin, end in bounds)
        strides = tuple(step * 2 * ITEMSIZE for step in contiguous_strides(sizes))
        own = builder.own.append(f"own.{position}", TensorType("bfloat16", ITEMSIZE, sizes, strides))
        builder.append(tensor, [begin for begin, _ in bounds], own, 0, BoxType(sizes, strides))
    return builder.build()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[PlacementMap, list[PlacementMap]]:
    """Return the map of a target, and those of sources, some with another tensor of the same name."""
    shapes = [(8,) * rank for rank in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))]
    maps = []
    for _ in range(draw(st.integers(1, 6))):
        other = [(8, 8) if draw(st.integers(0, 9)) == 0 else shape for shape in shapes]
        maps.append(map_of(draw(rows_of_layout(other)), other))
    return map_of(draw(rows_of_layout(shapes)), shapes), maps


@settings(max_examples=400, deadline=None)
@given(layouts())
def test_any_division_is_that_of_a_search_box_by_box(example: tuple[PlacementMap, list[PlacementMap]]) -> None:
    """For any layouts, with overlaps and missing parts, each source has the same boxes in the same order."""
    target, sources = example
    assert_divided(divide(wanted_boxes(target), sources), wanted_boxes(target), sources)


@settings(max_examples=400, deadline=None)
@given(layouts())
def test_any_copies_are_those_of_a_search_row_by_row(example: tuple[PlacementMap, list[PlacementMap]]) -> None:
    """For any layouts, the copies are the same, in the same order."""
    target, sources = example
    assert_copied(sources, target)


@pytest.mark.parametrize("target_layout", LAYOUTS)
@pytest.mark.parametrize("source_layout", LAYOUTS)
def test_layouts_of_engines_are_divided_as_by_a_search(source_layout: str, target_layout: str) -> None:
    """Fused, interleaved and replicated tensors have the same parts, also with the sources reversed."""
    sources = [map_of_rank(*each) for each in LAYOUTS[source_layout]]
    for each in LAYOUTS[target_layout]:
        target = map_of_rank(*each)
        for ordered in (sources, sources[::-1]):
            assert_divided(divide(wanted_boxes(target), ordered), wanted_boxes(target), ordered)
            assert_copied(ordered, target)


def test_the_parts_of_a_failed_source_are_divided() -> None:
    """Several boxes of one tensor, as those of a source that failed, are divided independently."""
    parts = divide(wanted_boxes(map_of_rank(0, 1)), [map_of_rank(rank, 4) for rank in range(4)]).parts
    boxes = [box for part in parts for box in part]
    sources = [map_of_rank(0, 2), map_of_rank(1, 2)]
    assert_divided(divide(boxes, sources), boxes, sources)


def tiled_boxes(target: PlacementMap, sources: Sequence[PlacementMap], rank: int) -> list[int]:
    """Return the tensors of the target's boxes that are tiled, each once."""
    boxes = target.row_boxes(rank)
    indices = [source.checkpoint.indices_of(target.checkpoint)[boxes.tensors] for source in sources]
    found = tiles(boxes.starts, boxes.stops, [SourceRows(source, rank) for source in sources], indices)
    return [tensor for tensor, _ in groupby(boxes.tensors[found.boxes].tolist())]


HALVES = [((0, 4), (0, 8)), ((4, 8), (0, 8))]
QUARTERS = [((0, 4), (0, 4)), ((0, 4), (4, 8)), ((4, 8), (0, 4)), ((4, 8), (4, 8))]


@pytest.mark.parametrize(
    ("parts", "is_tiled"),
    [
        ([((0, 8), (0, 8))], True),
        (HALVES, True),
        (HALVES[::-1], True),
        ([HALVES[0], HALVES[0], HALVES[1]], True),
        ([HALVES[0]], False),
        (QUARTERS, False),
        ([((0, 5), (0, 8)), HALVES[1]], False),
        ([HALVES[0], ((0, 8), (0, 8))], False),
    ],
    ids=["one", "halves", "reversed", "replicated", "missing", "quarters", "overlapping", "half and all"],
)
def test_boxes_are_tiled_by_rows_along_one_dimension(parts: list[Bounds], is_tiled: bool) -> None:
    """Sources that divide a box along one dimension tile it; others are left to the search box by box."""
    target = map_of([(0, ((0, 8), (0, 8)))], [(8, 8)])
    sources = [map_of([(0, part)], [(8, 8)]) for part in parts]
    assert ([0] if is_tiled else []) == tiled_boxes(target, sources, 2)


def test_layouts_of_tensor_parallelism_are_tiled() -> None:
    """Between sizes of tensor parallelism, no tensor of two dimensions needs a search."""
    target = map_of_rank(0, 2)
    every = sorted(set(target.row_boxes(2).tensors.tolist()))
    assert every == sorted(set(tiled_boxes(target, [map_of_rank(rank, 4) for rank in range(4)], 2)))


def test_a_later_source_does_not_matter_to_tiled_boxes() -> None:
    """Rows of other sizes in a less preferred source do not leave a box to the search."""
    target = map_of([(0, ((0, 8), (0, 8)))], [(8, 8)])
    sources = [map_of([(0, part)], [(8, 8)]) for part in (*HALVES, ((1, 3), (2, 5)))]
    assert [0] == tiled_boxes(target, sources, 2)


def test_blocks_of_boxes_have_the_same_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of boxes whose candidates are in memory does not change the parts."""
    target, sources = map_of_rank(0, 1), [map_of_rank(rank, 4) for rank in range(4)]
    expected = divide(wanted_boxes(target), sources)
    monkeypatch.setattr(tiles_module, "MAX_BLOCK_BOXES", 3)
    assert expected == divide(wanted_boxes(target), sources)


def test_many_rows_of_one_tensor_are_divided() -> None:
    """A tensor in many rows of a source has the same parts as one in few."""
    count = INDEXED_ROWS + 4
    shape = (count, 2)
    rows = [(0, ((each, each + 1), (0, 2))) for each in range(count)]
    target = map_of([(0, ((3, count - 2), (0, 2)))], [shape])
    sources = [map_of(rows[: count - 1], [shape]), map_of(rows[count - 5 :], [shape])]
    assert_divided(divide(wanted_boxes(target), sources), wanted_boxes(target), sources)
    assert_copied(sources, target)
