"""Geometry of strided regions, compared with sets of elements."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.placement.strided import (
    Grid,
    Loop,
    NotStridedError,
    Region,
    boxes,
    common,
    difference,
    joined,
    merged,
    overlapping_pairs,
)


def elements(region: Region) -> list[tuple[int, int]]:
    """Return the offsets of every element on both sides."""
    pairs = [(region.checkpoint_offset, region.own_offset)]
    for count, checkpoint_step, own_step in region.loops:
        pairs = [(one + i * checkpoint_step, two + i * own_step) for one, two in pairs for i in range(count)]
    return pairs


def test_adjacent_loops_are_merged() -> None:
    """Loops over a contiguous region become one."""
    assert (Loop(12, 1, 2),) == merged([Loop(3, 4, 8), Loop(1, 7, 7), Loop(4, 1, 2)])


def test_a_contiguous_copy_is_one_box() -> None:
    """A complete tensor that is copied to one of the same shape is one box."""
    grid = Grid((3, 4), (4, 1))
    assert 1 == len(boxes(Region(0, 0, (Loop(3, 4, 4), Loop(4, 1, 1))), grid, grid))


def test_heads_of_one_dimension_are_separate_boxes() -> None:
    """A loop over heads and one over their rows, both along one checkpoint dimension, become a box for each head."""
    region = Region(0, 0, (Loop(2, 4, 1), Loop(4, 1, 2)))
    assert 2 == len(boxes(region, Grid((8,), (1,)), Grid((4, 2), (2, 1))))


def test_an_expanded_region_has_no_boxes() -> None:
    """A region that reads an element several times is refused."""
    with pytest.raises(NotStridedError, match="expanded"):
        boxes(Region(0, 0, (Loop(3, 0, 1),)), Grid((8,), (1,)), Grid((8,), (1,)))


def test_a_region_outside_the_tensor_has_no_boxes() -> None:
    """A region that starts outside the own tensor is refused."""
    with pytest.raises(NotStridedError, match="outside"):
        boxes(Region(0, 8, ()), Grid((8,), (1,)), Grid((8,), (1,)))


def test_interleaved_reads_are_bounded() -> None:
    """A region that needs more boxes than the limit is refused."""
    with pytest.raises(NotStridedError, match="boxes"):
        boxes(Region(0, 0, (Loop(1 << 17, 2, 1),)), Grid((1 << 18,), (1,)), Grid((1 << 17,), (1,)))


shapes = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3).map(tuple)


@given(st.data(), shapes)
def test_boxes_have_the_elements_of_the_region(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """The boxes of a permuted, reshaped copy have exactly its elements, and each runs along single dimensions."""
    size = int(np.prod(shape))
    strides = [int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
    order = data.draw(st.permutations(range(len(shape))))
    sizes = [shape[dim] for dim in order]
    own_steps = [int(np.prod(sizes[dim + 1 :])) for dim in range(len(sizes))]
    own_shape = data.draw(st.sampled_from([tuple(sizes), (size,), (*sizes, 1), (1, size), tuple(reversed(sizes))]))
    own_strides = [int(np.prod(own_shape[dim + 1 :])) for dim in range(len(own_shape))]
    region = Region(
        0, 0, tuple(Loop(n, strides[dim], step) for n, dim, step in zip(sizes, order, own_steps, strict=True))
    )
    checkpoint, own = Grid(shape, strides), Grid(own_shape, own_strides)
    found = boxes(region, checkpoint, own)
    for box in found:
        assert list(box.checkpoint_index) == checkpoint.index_of(box.region.checkpoint_offset)
        assert list(box.own_index) == own.index_of(box.region.own_offset)
        assert len(set(box.checkpoint_dims)) == len(set(box.own_dims)) == len(box.region.loops)
        for loop, dim, own_dim in zip(box.region.loops, box.checkpoint_dims, box.own_dims, strict=True):
            assert loop.checkpoint_step == checkpoint.strides[dim]
            assert loop.own_step % own.strides[own_dim] == 0
            assert box.checkpoint_index[dim] + loop.size <= shape[dim]
    assert sorted(elements(region)) == sorted(pair for box in found for pair in elements(box.region))


ranges = st.tuples(st.integers(0, 6), st.integers(1, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))
bounds = st.tuples(ranges, ranges)


def members(box: tuple[tuple[int, int], ...]) -> set[tuple[int, ...]]:
    return set(product(*(range(begin, end) for begin, end in box)))


@given(bounds, bounds)
def test_common_and_difference_divide_a_box(
    one: tuple[tuple[int, int], tuple[int, int]], other: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    """The common box and the boxes of the difference are disjoint and together the box."""
    overlap = common(one, other)
    assert (members(one) & members(other)) == (members(overlap) if overlap is not None else set())
    if overlap is not None:
        parts = difference(one, overlap)
        assert members(one) - members(overlap) == {index for part in parts for index in members(part)}
        assert len(members(one)) - len(members(overlap)) == sum(len(members(part)) for part in parts)


@given(st.lists(bounds, max_size=12))
def test_overlapping_pairs_are_all_pairs_with_common_indices(
    found: list[tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    """Each pair of boxes with a common index is yielded once."""
    array = np.array(found, dtype=np.int64).reshape(len(found), 2, 2)
    expected = [
        (first, second)
        for second in range(len(found))
        for first in range(second)
        if members(found[first]) & members(found[second])
    ]
    assert sorted(expected) == sorted(overlapping_pairs(array[:, :, 0], array[:, :, 1]))


def test_adjacent_boxes_are_joined() -> None:
    """Four quarters, and rows that alternate, are one box."""
    quarters = [((2, 4), (0, 3)), ((0, 2), (3, 6)), ((0, 2), (0, 3)), ((2, 4), (3, 6))]
    assert [((0, 4), (0, 6))] == joined(quarters)
    rows = [((row, row + 1), (0, 6)) for row in (0, 2, 4, 1, 3, 5)]
    assert [((0, 6), (0, 6))] == joined(rows)


def test_boxes_that_are_not_adjacent_are_kept() -> None:
    """A gap, and boxes of different sizes, cannot be joined."""
    apart = [((0, 1), (0, 6)), ((2, 3), (0, 6)), ((3, 4), (0, 5))]
    assert apart == joined(apart)


def test_nothing_is_joined_to_nothing() -> None:
    """An empty list, and the box of a scalar, stay as they are."""
    assert [] == joined([])
    assert [()] == joined([()])
