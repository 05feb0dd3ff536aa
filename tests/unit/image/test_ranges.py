"""Sets of integers as ranges, compared with Python's own sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.image import ranges
from rfork.image.memory import overlaps

some_ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def members(pairs: list[ranges.Range] | tuple[ranges.Range, ...]) -> set[int]:
    return {number for begin, end in pairs for number in range(begin, end)}


@pytest.mark.parametrize(
    ("input_ranges", "expected"),
    [
        ([], ()),
        ([(3, 3)], ()),
        ([(5, 2)], ()),
        ([(4, 6), (0, 2)], ((0, 2), (4, 6))),
        ([(0, 2), (2, 4)], ((0, 4),)),
        ([(0, 9), (2, 4)], ((0, 9),)),
    ],
)
def test_normalised_ranges_are_sorted_and_merged(
    input_ranges: list[ranges.Range], expected: tuple[ranges.Range, ...]
) -> None:
    """Ranges are sorted, non-empty, and merged if they touch."""
    assert expected == ranges.normalise(input_ranges)


@given(some_ranges)
def test_ranges_survive_conversion_to_indices(pairs: list[ranges.Range]) -> None:
    """Converting ranges to integers and back normalises them, and count counts the integers."""
    normal = ranges.normalise(pairs)
    assert normal == ranges.from_indices(ranges.indices(normal))
    assert len(members(pairs)) == ranges.count(normal)


@given(some_ranges, some_ranges)
def test_subtract_and_intersect_match_set_operations(one: list[ranges.Range], two: list[ranges.Range]) -> None:
    """Difference and intersection contain exactly the integers of the sets."""
    assert ranges.from_indices(members(one) - members(two)) == ranges.subtract(one, two)
    assert ranges.from_indices(members(one) & members(two)) == ranges.intersect(one, two)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=20), some_ranges)
def test_overlaps_are_found_for_each_range(spans: list[tuple[int, int]], pairs: list[ranges.Range]) -> None:
    """A range overlaps if it has a member in common; an empty one never does."""
    merged = ranges.normalise(pairs)
    begins = np.array([begin for begin, _ in spans], dtype=np.int64)
    lengths = np.array([length for _, length in spans], dtype=np.int64)
    expected = [not members(merged).isdisjoint(range(begin, begin + length)) for begin, length in spans]
    assert expected == overlaps(begins, lengths, merged).tolist()


def test_overlaps_reach_the_end_of_the_address_space() -> None:
    """The kernel's mappings lie above every signed address."""
    begins, lengths = np.array([4096], dtype=np.int64), np.array([8], dtype=np.int64)
    merged = ((0, 4096), (0xFFFFFFFFFF600000, 0xFFFFFFFFFF601000))
    assert [False] == overlaps(begins, lengths, merged).tolist()
