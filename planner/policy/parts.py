"""Parts of an image: cut from lists of chunks, and put together by who gives them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from planner.fleet import Assignment, Source, Storage
from planner.policy.ways import shared_transports
from rfork.image.ranges import Range, count, normalise


def assigned(target: Source, shares: Iterable[tuple[Source, tuple[Range, ...]]]) -> tuple[Assignment, ...]:
    """The assignments of a decision, one a source."""
    merged: dict[str, tuple[Source, tuple[Range, ...]]] = {}
    for source, chunks in shares:
        before = merged.get(source.instance_id, (source, ()))[1]
        merged[source.instance_id] = source, normalise((*before, *chunks))
    return tuple(
        Assignment(source.instance_id, chunks, shared_transports(source, target))
        for source, chunks in merged.values()
        if chunks
    )


def merged(
    storage: Iterable[tuple[Storage, tuple[Range, ...]]],
) -> tuple[tuple[Storage, tuple[Range, ...]], ...]:
    """The reads of a decision from storage, one a storage."""
    found: dict[Storage, tuple[Range, ...]] = {}
    for each, chunks in storage:
        found[each] = normalise((*found.get(each, ()), *chunks))
    return tuple(found.items())


def split(chunks: tuple[Range, ...], parts: int) -> list[tuple[Range, ...]]:
    """Cut into at most `parts` runs of chunks in order, whose sizes differ by one at most; none is empty."""
    total = count(chunks)
    parts = min(parts, total)
    bounds = [total * part // parts for part in range(parts + 1)] if parts else [0]
    return [cut(chunks, begin, end) for begin, end in pairwise(bounds)]


def cut(chunks: tuple[Range, ...], begin: int, end: int) -> tuple[Range, ...]:
    """The chunks from the `begin`-th to before the `end`-th of those given."""
    found: list[Range] = []
    passed = 0
    for first, stop in chunks:
        low, high = max(begin - passed, 0), min(end - passed, stop - first)
        if low < high:
            found.append((first + low, first + high))
        passed += stop - first
    return tuple(found)
