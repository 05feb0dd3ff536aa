"""Detection of targets that their sources delay, while a seed without readers could serve them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from planner.policy.types import ChunkShare, Source
from rfork.image.ranges import Range, count, subtract

MIN_DELAYED: Final = 1 / 16
"""Fraction of the image for which another plan is worth its cost."""
DELAYED_RATE: Final = 0.75
"""A target that reads at this fraction of a link is not delayed."""


class GroupReads(Protocol):
    """The reads in a group: of a GroupView, or of the index itself, because a view costs more than this decision."""

    @property
    def sources(self) -> Mapping[str, Source]:
        """See GroupView."""
        ...

    @property
    def readers(self) -> Mapping[str, Mapping[str, float]]:
        """See GroupView."""
        ...

    @property
    def shares(self) -> Mapping[str, tuple[ChunkShare, ...]]:
        """See GroupView."""
        ...


def is_starving(group: GroupReads, target: Source, idle_seed: Source) -> bool:
    """Return True if the target should request a plan, to read from an idle seed what its sources delay.

    Its new source is complete and has no other reader, so it requests no third plan for this reason.
    """
    if not is_delayed(target, idle_seed):
        return False
    chunks: list[Range] = []
    for share in group.shares.get(target.instance_id, ()):
        source = group.sources.get(share.source_id)
        if source is None or source.instance_id == target.instance_id:
            continue
        if not source.complete or len(group.readers.get(share.source_id, ())) > 1:
            chunks += subtract(share.chunks, target.verified)
    return is_worth_replan(chunks, target, idle_seed)


def is_delayed(target: Source, idle_seed: Source) -> bool:
    """Return True if the target reads more slowly than a link allows, by its last report."""
    return target.read_rate is not None and _relative_rate(target, idle_seed) < 1


def is_worth_replan(chunks: Iterable[Range], target: Source, idle_seed: Source) -> bool:
    """Return True if the target should request another plan for these chunks: the fewer, the more slowly it reads."""
    return count(chunks) > MIN_DELAYED * target.chunk_count * _relative_rate(target, idle_seed)


def _relative_rate(target: Source, idle_seed: Source) -> float:
    link = DELAYED_RATE * max(target.ingress_rate or 0.0, idle_seed.ingress_rate or 0.0)
    return (target.read_rate or 0.0) / link if link else 1.0
