"""Two trees over a line of targets: their shape, depth and disjoint inner nodes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import ceil, log2

import pytest

from planner.policy.trees import LARGE, ROOT, two_trees

LENGTHS = [*range(1, 40), 64, 100, 127, 128, 255, 1000]

SHAPES: list[tuple[int, tuple[list[int], list[int]]]] = [
    (0, ([], [])),
    (1, ([ROOT], [ROOT])),
    (2, ([ROOT, 0], [1, ROOT])),
    (3, ([2, 0, ROOT], [1, ROOT, 1])),
    (7, ([2, 0, 4, 2, ROOT, 6, 4], [1, 3, 1, ROOT, 5, 3, 5])),
]


def depth(parents: list[int], position: int) -> int:
    """Return the number of links from the source to the position."""
    links = 1
    while parents[position] != ROOT:
        position, links = parents[position], links + 1
    return links


@pytest.mark.parametrize(("length", "expected"), SHAPES)
def test_small_trees_have_the_expected_shape(length: int, expected: tuple[list[int], list[int]]) -> None:
    """Each target's parents in both trees match the expected shape."""
    assert expected == two_trees(length)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_target_has_at_most_two_children_in_one_tree_only(length: int) -> None:
    """It sends its half of the image at most twice."""
    first, second = (Counter(parents) for parents in two_trees(length))
    inner = [{position for position in tree if position != ROOT} for tree in (first, second)]
    assert set() == inner[0] & inner[1]
    assert {1, 2} >= {number for tree in (first, second) for number in tree.values()}


@pytest.mark.parametrize("length", LENGTHS)
def test_each_tree_has_one_root_and_minimal_depth(length: int) -> None:
    """Half of the targets are inner nodes; the others are their leaves."""
    max_children = 2 if length >= LARGE else 1
    for parents in two_trees(length):
        assert 1 == parents.count(ROOT)
        assert max(depth(parents, position) for position in range(length)) <= ceil(log2(length)) + max_children


@pytest.mark.parametrize("length", LENGTHS)
def test_neighbours_in_the_line_are_neighbours_in_the_trees(length: int) -> None:
    """A leaf's parent is its neighbour, and each subtree is one run of positions."""
    for parity, parents in enumerate(two_trees(length)):
        below: dict[int, set[int]] = {position: {position} for position in range(length)}
        for position in sorted(range(length), key=lambda position: -depth(parents, position)):
            if parents[position] != ROOT:
                below[parents[position]] |= below[position]
        for position, members in below.items():
            if position % 2 != parity:
                assert {position} == members
                assert length == 1 or abs(parents[position] - position) == 1
            else:
                assert all(after - before == 1 for before, after in pairwise(sorted(members)))
