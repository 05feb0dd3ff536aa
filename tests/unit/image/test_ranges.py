"""Sets of integers as ranges, checked against Python's own sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.image import ranges

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
def test_normalise(input_ranges: list[ranges.Range], expected: tuple[ranges.Range, ...]) -> None:
    """Ranges come back sorted, non-empty, and merged where they touch."""
    assert expected == ranges.normalise(input_ranges)


@given(some_ranges)
def test_indices_and_back(pairs: list[ranges.Range]) -> None:
    """Ranges to integers and back is normalise, and count counts them."""
    normal = ranges.normalise(pairs)
    assert normal == ranges.from_indices(ranges.indices(normal))
    assert len(members(pairs)) == ranges.count(normal)


@given(some_ranges, some_ranges)
def test_subtract_and_intersect_are_those_of_sets(one: list[ranges.Range], two: list[ranges.Range]) -> None:
    """Difference and intersection hold exactly the integers that the sets' do."""
    assert ranges.from_indices(members(one) - members(two)) == ranges.subtract(one, two)
    assert ranges.from_indices(members(one) & members(two)) == ranges.intersect(one, two)
