"""Two trees over a line of targets: their shape, depth and disjoint inner nodes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from planner.policy.trees import ROOT, last_chunk_parents, two_trees

LENGTHS = [*range(1, 40), 64, 100, 127, 128, 255, 1000]

SHAPES: list[tuple[int, tuple[list[int], list[int]]]] = [
    (0, ([], [])),
    (1, ([ROOT], [ROOT])),
    (2, ([ROOT, 0], [1, ROOT])),
    (3, ([ROOT, 0, 0], [1, ROOT, 1])),
    (6, ([2, 0, ROOT, 4, 2, 4], [1, 3, 1, ROOT, 5, 3])),
    (7, ([2, 0, ROOT, 4, 2, 4, 0], [1, 3, 1, ROOT, 5, 3, 5])),
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
    """Half of the targets are inner nodes; the others are their leaves, one level below."""
    levels = (length // 2).bit_length() + 1
    for parents in two_trees(length):
        assert 1 == parents.count(ROOT)
        assert max(depth(parents, position) for position in range(length)) <= levels


@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 1])
def test_spare_capacity_at_the_top_costs_at_most_one_level(length: int) -> None:
    """The first target is the root of the first tree, the last of an even number that of the second."""
    first, second = two_trees(length, spare_at_top=True, keep_depth=True)
    levels = (length // 2).bit_length() + 2
    assert ROOT == first[0]
    assert ROOT == second[length - length % 2 - 1]
    assert max(depth(parents, position) for parents in (first, second) for position in range(length)) <= levels


@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 1])
def test_spare_capacity_at_the_top_is_left_to_others(length: int) -> None:
    """The roots have one child each in their tree, also if the number is odd."""
    first, second = two_trees(length, spare_at_top=True)
    assert 1 == first.count(first.index(ROOT))
    assert 1 == second.count(second.index(ROOT))


@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 1 and length % 2])
def test_the_last_of_an_odd_number_is_inserted_between_others(length: int) -> None:
    """It has one child in each tree, and no target has more than two, for at most one more level."""
    first, second = two_trees(length, spare_at_top=True)
    assert 1 == first.count(length - 1)
    assert 1 == second.count(length - 1)
    children = Counter(first) + Counter(second)
    assert 2 == max(number for position, number in children.items() if position != ROOT)
    levels = (length // 2).bit_length() + 3
    assert max(depth(parents, position) for parents in (first, second) for position in range(length)) <= levels


SPARE_DEPTHS = [(16, 2), (30, 4), (32, 2), (1000, 6), (10_000, 3), (11_500, 2)]


@pytest.mark.parametrize(("length", "expected"), SPARE_DEPTHS)
def test_spare_capacity_is_as_near_to_the_top_as_the_depth_allows(length: int, expected: int) -> None:
    """The first and the last target have one child each, at this depth of their tree."""
    first, second = two_trees(length)
    assert 1 == first.count(0)
    assert 1 == second.count(length - 1)
    assert expected == depth(first, 0)
    assert expected == depth(second, length - 1)


LAST_CHUNKS = [(7, 0), (9, 1), (16, 2), (31, 0), (64, 8), (100, 0), (1000, 0), (1200, 152), (10_000, 1416)]


@pytest.mark.parametrize(("length", "expected"), LAST_CHUNKS)
def test_on_a_sparse_last_level_one_of_two_children_reads_its_last_chunk_elsewhere(length: int, expected: int) -> None:
    """The other one keeps the parent to itself; if not all pairs find another parent, none does."""
    first, second = two_trees(length)
    for parents, other in ((first, second), (second, first)):
        depths = [depth(parents, position) for position in range(length)]
        found = last_chunk_parents(parents, other)
        pairs = Counter(parent for position, parent in enumerate(parents) if depths[position] == max(depths))
        assert expected == len(found)
        assert not found or len(found) == [*pairs.values()].count(2)
        assert len({parents[child] for child in found}) == len(found)


@pytest.mark.parametrize("length", [length for length, expected in LAST_CHUNKS if expected])
def test_who_sends_a_last_chunk_has_nothing_else_to_send_by_then(length: int) -> None:
    """It serves one such target, receives the chunk when their parents do, and its own readers end a link earlier."""
    first, second = two_trees(length)
    for parents, other in ((first, second), (second, first)):
        last = max(depth(parents, position) for position in range(length))
        found = last_chunk_parents(parents, other)
        assert len(set(found.values())) == len(found)
        for parent in found.values():
            assert parent not in parents
            assert last - 1 == depth(parents, parent)
            assert depth(other, parent) < last - 1


@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 1 and length % 2])
def test_the_last_of_an_odd_number_has_a_link_to_spare(length: int) -> None:
    """It is a leaf in both trees, below the targets that have half a link to spare."""
    for parents in two_trees(length):
        assert length - 1 not in parents
    assert [0, length - 2] == [parents[-1] for parents in two_trees(length)]


@pytest.mark.parametrize("length", [length for length in LENGTHS if length % 2 == 0])
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
                assert abs(parents[position] - position) == 1
            else:
                assert all(after - before == 1 for before, after in pairwise(sorted(members)))
