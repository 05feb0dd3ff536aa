"""Detection of relays that fall behind their own sources, so that no target waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from planner.policy.types import GroupView, Source
from rfork.image.ranges import count, intersect, subtract

MIN_BACKLOG: Final = 1 / 24
"""Fraction of the image that a target must have left unread at its sources to count as slow."""
SLOW_RATE: Final = 0.35
"""A target is slow if it reads at less than this fraction of the group's median rate."""


def stragglers(group: GroupView, now: float) -> frozenset[str]:
    """Return relays with readers that fall behind their own sources, by the last reports; pure.

    If all readers of one source fall behind it, and behind no other source, the source is the slow one.
    """
    targets: list[Source] = []
    readers: dict[str, list[str]] = {}
    for target_id, shares in group.shares.items():
        target = group.sources.get(target_id)
        if target is None or now >= target.expires_at or target.complete:
            continue
        targets.append(target)
        for share in shares:
            if share.source_id != target_id:
                readers.setdefault(share.source_id, []).append(target_id)
    rates = sorted(target.ingress_rate for target in targets if target.ingress_rate)
    if not rates:
        return frozenset()
    link = rates[len(rates) * 3 // 4]
    slow = {target.instance_id for target in targets if target.slow}
    for _ in range(2):
        lagging = {
            target.instance_id: behind
            for target in targets
            if not target.slow and (behind := _sources_ahead(group, target, link, readers, slow))
        }
        slow |= lagging.keys()
    found: set[str] = set()
    for target_id, behind in lagging.items():
        slow_sources = {
            name
            for name in behind
            if len(readers[name]) > 1 and all(lagging.get(reader) == {name} for reader in readers[name])
        }
        found |= slow_sources or {target_id}
    return frozenset(name for name in found if name in readers)


def _sources_ahead(
    group: GroupView, target: Source, link: float, readers: Mapping[str, Sequence[str]], slow: AbstractSet[str]
) -> frozenset[str]:
    """Return the sources that the target falls behind; none unless it is slower than they would allow."""
    if target.read_rate is None:
        return frozenset()
    backlogs: dict[str, int] = {}
    expected = 0.0
    for share in group.shares[target.instance_id]:
        source = group.sources.get(share.source_id)
        if source is not None and source is not target and (source.instance_id not in slow or source.complete):
            backlogs[source.instance_id] = count(
                subtract(intersect(share.chunks, source.verified), target.verified)
            )
            expected += 1 / len(readers[source.instance_id])
    backlog = sum(backlogs.values()) / max(1, target.chunk_count)
    if backlog < (MIN_BACKLOG if target.verified else 2 * MIN_BACKLOG):
        return frozenset()
    if target.read_rate >= SLOW_RATE * min(1.0, expected) * link:
        return frozenset()
    if backlog < 1 / 6 and (target.ingress_rate or 0.0) >= 2 * SLOW_RATE * link:
        return frozenset()
    return frozenset(name for name, chunks in backlogs.items() if chunks)
