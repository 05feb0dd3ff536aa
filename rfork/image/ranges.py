"""Sets of integers as sorted half-open ranges: which chunks, which bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Range = tuple[int, int]


def normalise(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort, drop empty ranges, and merge those that touch or overlap."""
    merged: list[Range] = []
    for begin, end in sorted(pair for pair in ranges if pair[0] < pair[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return tuple(merged)


def from_indices(indices: Iterable[int]) -> tuple[Range, ...]:
    """The ranges that cover exactly these integers."""
    return normalise((index, index + 1) for index in indices)


def indices(ranges: Iterable[Range]) -> Iterator[int]:
    """Every integer in the ranges, in the order of the ranges."""
    for begin, end in ranges:
        yield from range(begin, end)


def count(ranges: Iterable[Range]) -> int:
    """How many integers the (disjoint) ranges hold."""
    return sum(end - begin for begin, end in ranges)


def subtract(ranges: Iterable[Range], removed: Iterable[Range]) -> tuple[Range, ...]:
    """What is in `ranges` but not in `removed`."""
    holes = normalise(removed)
    left: list[Range] = []
    for begin, end in normalise(ranges):
        cursor = begin
        for hole_begin, hole_end in holes:
            if hole_end <= cursor or hole_begin >= end:
                continue
            if hole_begin > cursor:
                left.append((cursor, hole_begin))
            cursor = max(cursor, hole_end)
        if cursor < end:
            left.append((cursor, end))
    return tuple(left)


def intersect(left: Iterable[Range], right: Iterable[Range]) -> tuple[Range, ...]:
    """What is in both."""
    left = normalise(left)
    return subtract(left, subtract(left, right))
