"""Splitting of chunk ranges, and merging of ranges by source."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from planner.policy.transports import shared_transports
from planner.policy.types import RouteAssignment, Source, Storage
from rfork.image.ranges import Range, count, normalise


def to_assignments(target: Source, shares: Iterable[tuple[Source, tuple[Range, ...]]]) -> tuple[RouteAssignment, ...]:
    """Return the assignments of a decision, one per source."""
    chunks_by_source: dict[str, tuple[Source, tuple[Range, ...]]] = {}
    for source, chunks in shares:
        before = chunks_by_source.get(source.instance_id, (source, ()))[1]
        chunks_by_source[source.instance_id] = source, normalise((*before, *chunks))
    return tuple(
        RouteAssignment(source.instance_id, chunks, shared_transports(source, target))
        for source, chunks in chunks_by_source.values()
        if chunks
    )


def merge_storage_reads(
    storage: Iterable[tuple[Storage, tuple[Range, ...]]],
) -> tuple[tuple[Storage, tuple[Range, ...]], ...]:
    """Return a decision's reads from storage, one per storage."""
    found: dict[Storage, tuple[Range, ...]] = {}
    for each, chunks in storage:
        found[each] = normalise((*found.get(each, ()), *chunks))
    return tuple(found.items())


def split(chunks: tuple[Range, ...], part_count: int) -> list[tuple[Range, ...]]:
    """Split into at most `part_count` non-empty runs of chunks, in order, whose sizes differ by at most one."""
    total = count(chunks)
    part_count = min(part_count, total)
    bounds = [total * part // part_count for part in range(part_count + 1)] if part_count else [0]
    return [cut(chunks, begin, end) for begin, end in pairwise(bounds)]


def split_alternately(chunks: tuple[Range, ...], run_count: int) -> list[tuple[Range, ...]]:
    """Split into two parts, of alternating runs of chunks, and of `run_count` runs together.

    A target that reads all chunks in order always has about as many of one part as of the other.
    """
    runs = split(chunks, run_count)
    return [normalise(tuple(piece for run in runs[part::2] for piece in run)) for part in range(2)]


def cut(chunks: tuple[Range, ...], begin: int, end: int) -> tuple[Range, ...]:
    """Return the chunks from index `begin` to before index `end` of these ranges."""
    found: list[Range] = []
    offset = 0
    for first, stop in chunks:
        low, high = max(begin - offset, 0), min(end - offset, stop - first)
        if low < high:
            found.append((first + low, first + high))
        offset += stop - first
    return tuple(found)
