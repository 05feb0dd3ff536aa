"""Detection of relays that fall behind their own sources, so that no target waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from planner.policy.background import targets_waited_for
from planner.policy.types import GroupView, Source
from rfork.image.ranges import count, intersect, subtract

MIN_BACKLOG: Final = 1 / 16
"""Fraction of the image that a slow target has yet to read although its sources have it."""
MIN_BACKLOG_ONCE_FAST: Final = 1 / 6
"""The same for a target that has read faster before."""
SLOW_RATE: Final = 0.35
"""A slow target reads at less than this fraction of what its sources could send it."""
LINK_QUANTILE: Final = 0.75
"""Quantile of the targets' fastest observed rates that counts as the speed of a link."""


def stragglers(group: GroupView, now: float) -> frozenset[str]:
    """Return relays with readers that fall behind their own sources, by the last reports; pure.

    A target falls behind if chunks wait for it at its sources and it still reads slowly. Sources that are slow
    themselves do not count, nor do background forks, which yield to others. If all readers of one source fall
    behind it, and behind no other, the source is the slow one.
    """
    waited_for: frozenset[str] = frozenset()
    if group.background_forks:
        waited_for = targets_waited_for(group.shares, group.sources.get, lambda name: group.shares.get(name, ()))
    targets: list[Source] = []
    readers: dict[str, list[str]] = {}
    for target_id, shares in group.shares.items():
        target = group.sources.get(target_id)
        if target is None or now >= target.expires_at or target.complete:
            continue
        if target.background and target_id not in waited_for:
            continue
        targets.append(target)
        for share in shares:
            if share.source_id != target_id:
                readers.setdefault(share.source_id, []).append(target_id)
    rates = sorted(target.ingress_rate for target in targets if target.ingress_rate)
    if not rates:
        return frozenset()
    link = rates[int(LINK_QUANTILE * len(rates))]
    slow = {target.instance_id for target in targets if target.slow}
    lagging: dict[str, frozenset[str]] = {}
    for _ in range(2):  # the second time without the sources that the first time found
        lagging = {
            target.instance_id: ahead
            for target in targets
            if not target.slow and (ahead := _sources_ahead(group, target, link, readers, slow))
        }
        slow |= lagging.keys()
    found: set[str] = set()
    for target_id, ahead in lagging.items():
        slow_sources = {
            name
            for name in ahead
            if len(readers[name]) > 1 and all(lagging.get(reader) == frozenset({name}) for reader in readers[name])
        }
        found |= slow_sources or {target_id}
    return frozenset(name for name in found if name in readers)


def _sources_ahead(
    group: GroupView, target: Source, link: float, readers: Mapping[str, Sequence[str]], slow: AbstractSet[str]
) -> frozenset[str]:
    """Return the sources that the target falls behind; none if it reads as fast as they can send, or has only
    begun.
    """
    if target.read_rate is None or not target.verified:
        return frozenset()
    waiting: dict[str, int] = {}
    expected = 0.0
    for share in group.shares[target.instance_id]:
        source = group.sources.get(share.source_id)
        if source is None or source is target or (source.instance_id in slow and not source.complete):
            continue
        waiting[source.instance_id] = count(subtract(intersect(share.chunks, source.verified), target.verified))
        expected += 1 / len(readers[source.instance_id])
    if target.read_rate >= SLOW_RATE * min(1.0, expected) * link:
        return frozenset()
    once_fast = (target.ingress_rate or 0.0) >= 2 * SLOW_RATE * link
    min_backlog = MIN_BACKLOG_ONCE_FAST if once_fast else MIN_BACKLOG
    if sum(waiting.values()) < min_backlog * target.chunk_count:
        return frozenset()
    return frozenset(name for name, chunks in waiting.items() if chunks)
