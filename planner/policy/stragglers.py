"""Detection of relays that fall behind their own sources, so that no target waits for them."""

from __future__ import annotations

from statistics import median
from typing import Final

from planner.policy.types import GroupView, Source
from rfork.image.ranges import count, intersect, subtract

LAG_THRESHOLD: Final = 6
"""A relay is slow once it lags by more than one chunk in this many, and by a multiple of the median lag."""
MAX_MARKED_FRACTION: Final = 4.0


def stragglers(group: GroupView, now: float) -> frozenset[str]:
    """Return relays with readers that fall behind their own sources, by the last reports; pure.

    If all readers of one source fall behind it, the source is the slow one.
    """
    lag_by_target: dict[str, float] = {}
    readers: dict[str, list[str]] = {}
    for target_id, shares in group.shares.items():
        target = group.sources.get(target_id)
        if target is None or now >= target.expires_at or target.complete:
            continue
        lag_by_target[target_id] = _lag(group, target)
        for share in shares:
            if share.source_id != target_id:
                readers.setdefault(share.source_id, []).append(target_id)
    if not lag_by_target:
        return frozenset()
    median_lag = median(lag_by_target.values())
    lagging = {
        target_id
        for target_id, lag in lag_by_target.items()
        if lag > 1 / LAG_THRESHOLD and lag > MAX_MARKED_FRACTION * median_lag
    }
    found: set[str] = set()
    for target_id in lagging:
        sources = {share.source_id for share in group.shares[target_id]} - {target_id}
        slow_sources = {name for name in sources if len(readers[name]) > 1 and set(readers[name]) <= lagging}
        found |= slow_sources or {target_id}
    return frozenset(name for name in found if name in readers)


def _lag(group: GroupView, target: Source) -> float:
    """Return the fraction of the image that the target's relays have of its shares and it does not.

    Seeds do not count: they have everything from the start.
    """
    total = 0
    for share in group.shares.get(target.instance_id, ()):
        source = group.sources.get(share.source_id)
        if source is not None and not source.complete and source is not target:
            total += count(subtract(intersect(share.chunks, source.verified), target.verified))
    return total / max(1, target.chunk_count)
