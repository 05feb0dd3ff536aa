"""Splitting of chunk ranges, and merging of ranges by source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from planner.policy.transports import shared_transports
from planner.policy.types import RouteAssignment, Source, Storage
from rfork.image.ranges import Range, count, normalise

ALTERNATING_RUNS: Final = 32
"""Runs of chunks that alternate between the parts below relays. The second part waits for the first run, 1/32 of a
transfer, and each run is a part of every plan.
"""


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


def split_alternately(chunks: tuple[Range, ...], weights: Sequence[float]) -> list[tuple[Range, ...]]:
    """Split into a part for each weight, of alternating runs of chunks: about as many as the weights of each part.

    A source that receives the chunks in order always has about its share of each part.
    """
    total_weight = sum(weights)
    parts: list[list[Range]] = [[] for _ in weights]
    sizes = [0] * len(weights)
    begun = 0
    for run in split(chunks, max(len(weights), ALTERNATING_RUNS)):
        begun += count(run)
        lacking = [weight / total_weight * begun - size for weight, size in zip(weights, sizes, strict=True)]
        index = lacking.index(max(lacking))
        parts[index] += run
        sizes[index] += count(run)
    return [normalise(part) for part in parts]


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
