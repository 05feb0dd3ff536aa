"""Detection of targets that wait for relays, while a seed without readers could serve them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from planner.policy.types import GroupView, Source
from rfork.image.ranges import Range, count, subtract

MIN_LACKING: Final = 1 / 16
"""Fraction of the image that the relays of a target must lack, so that it is worth another plan."""
MAX_STARVED_RATE: Final = 0.6
"""Fraction of a link at which a target counts as starved."""


def is_starving(group: GroupView, target: Source, idle_seed: Source | None) -> bool:
    """Return True if the target should request a plan, to read from the idle seed what its sources delay."""
    if idle_seed is None or not is_slowed(target, idle_seed):
        return False
    delayed: list[Range] = []
    for share in group.shares.get(target.instance_id, ()):
        source = group.sources.get(share.source_id)
        if share.source_id != target.instance_id and source is not None:
            if not source.complete or len(group.readers.get(share.source_id, ())) > 1:
                delayed += subtract(share.chunks, target.verified)
    return is_worth_replan(delayed, target)


def is_slowed(target: Source, idle_seed: Source) -> bool:
    """Return True if the target reads more slowly than links allow, by its last report."""
    link = max(target.ingress_rate or 0.0, idle_seed.ingress_rate or 0.0)
    return target.read_rate is not None and target.read_rate < MAX_STARVED_RATE * link


def is_worth_replan(chunks: Iterable[Range], target: Source) -> bool:
    """Return True if these are enough chunks for another plan."""
    return count(chunks) >= MIN_LACKING * target.chunk_count
