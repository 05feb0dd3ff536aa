"""Sets of integers (chunks, bytes) as sorted half-open ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Range = tuple[int, int]


def normalise(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort, drop empty ranges, and merge those that touch or overlap."""
    pairs = ranges if isinstance(ranges, tuple) else tuple(ranges)
    # Nearly all inputs are normalised already, and plans call this for every source.
    last = -1
    for begin, end in pairs:
        if not last < begin < end:
            break
        last = end
    else:
        return pairs
    merged: list[Range] = []
    for begin, end in sorted(pair for pair in pairs if pair[0] < pair[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return tuple(merged)


def from_indices(indices: Iterable[int]) -> tuple[Range, ...]:
    """Return the ranges that cover exactly these integers."""
    return normalise((index, index + 1) for index in indices)


def indices(ranges: Iterable[Range]) -> Iterator[int]:
    """Yield every integer in the ranges, in their order."""
    for begin, end in ranges:
        yield from range(begin, end)


def count(ranges: Iterable[Range]) -> int:
    """Return the number of integers in the (disjoint) ranges."""
    total = 0
    for begin, end in ranges:
        total += end - begin
    return total


def subtract(ranges: Iterable[Range], removed: Iterable[Range]) -> tuple[Range, ...]:
    """Return the integers in `ranges` that are not in `removed`."""
    kept, holes = normalise(ranges), normalise(removed)
    if not holes:
        return kept
    if kept == holes:
        return ()
    left: list[Range] = []
    first = 0
    for begin, end in kept:
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        for index in range(first, len(holes)):
            hole_begin, hole_end = holes[index]
            if hole_begin >= end:
                break
            if hole_begin > begin:
                left.append((begin, hole_begin))
            begin = hole_end
        if begin < end:
            left.append((begin, end))
    return tuple(left)


def intersect(left: Iterable[Range], right: Iterable[Range]) -> tuple[Range, ...]:
    """Return the integers in both."""
    ours, theirs = normalise(left), normalise(right)
    if ours == theirs:
        return ours
    found: list[Range] = []
    one = other = 0
    while one < len(ours) and other < len(theirs):
        begin = max(ours[one][0], theirs[other][0])
        end = min(ours[one][1], theirs[other][1])
        if begin < end:
            found.append((begin, end))
        if ours[one][1] < theirs[other][1]:
            one += 1
        else:
            other += 1
    return tuple(found)
