"""Detection of relays that fall behind their own sources, so that no target waits for them."""

from __future__ import annotations

from typing import Final

from planner.policy.types import GroupView, Source
from rfork.image.ranges import count, intersect, subtract

MIN_BACKLOG: Final = 1 / 24
"""Fraction of the image that a target must have left unread at its sources to count as slow."""
SLOW_RATE: Final = 0.35
"""A target is slow if it reads at less than this fraction of the group's median rate."""


def stragglers(group: GroupView, now: float) -> frozenset[str]:
    """Return relays with readers that fall behind their own sources, by the last reports; pure.

    If all readers of one source fall behind it, the source is the slow one.
    """
    rates: dict[str, float] = {}
    readers: dict[str, list[str]] = {}
    for target_id, shares in group.shares.items():
        target = group.sources.get(target_id)
        if target is None or now >= target.expires_at or target.complete:
            continue
        if target.read_rate is not None:
            rates[target_id] = target.read_rate
        for share in shares:
            if share.source_id != target_id:
                readers.setdefault(share.source_id, []).append(target_id)
    measured = sorted(rate for name in rates if (rate := group.sources[name].ingress_rate))
    if not measured:
        return frozenset()
    link = measured[len(measured) * 3 // 4]
    lagging = {
        target_id
        for target_id, rate in rates.items()
        if rate < SLOW_RATE * link and _is_lagging(group, group.sources[target_id], link)
    }
    found: set[str] = set()
    for target_id in lagging:
        sources = {share.source_id for share in group.shares[target_id]} - {target_id}
        slow_sources = {name for name in sources if len(readers[name]) > 1 and set(readers[name]) <= lagging}
        found |= slow_sources or {target_id}
    return frozenset(name for name in found if name in readers)


def _is_lagging(group: GroupView, target: Source, link: float) -> bool:
    backlog = _backlog(group, target)
    return backlog >= 1 / 6 or (backlog >= MIN_BACKLOG and (target.ingress_rate or 0.0) < 2 * SLOW_RATE * link)


def _backlog(group: GroupView, target: Source) -> float:
    """Return the fraction of the image that the target's sources have of its shares and it does not."""
    total = 0
    for share in group.shares.get(target.instance_id, ()):
        source = group.sources.get(share.source_id)
        if source is not None and source is not target:
            total += count(subtract(intersect(share.chunks, source.verified), target.verified))
    return total / max(1, target.chunk_count)
