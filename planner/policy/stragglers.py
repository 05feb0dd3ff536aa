"""Who falls behind the sources it reads from, so that nobody should wait for it."""

from __future__ import annotations

from statistics import median
from typing import Final

from planner.fleet import Group, Source
from rfork.image.ranges import count, intersect, subtract

BEHIND: Final = 6
"""A relay is slow once it is more than a chunk in this many behind its sources, and four times as far
behind as the others are."""
MARKED: Final = 4.0


def stragglers(group: Group, now: float) -> frozenset[str]:
    """Relays with readers that fall behind their own sources, by what was told last; pure.

    Where all that read from one source fall behind it, the source is the slow one.
    """
    behind: dict[str, float] = {}
    readers: dict[str, list[str]] = {}
    for target_id, shares in group.shares.items():
        target = group.sources.get(target_id)
        if target is None or now >= target.expires_at or target.complete:
            continue
        behind[target_id] = _behind(group, target)
        for share in shares:
            if share.source_id != target_id:
                readers.setdefault(share.source_id, []).append(target_id)
    if not behind:
        return frozenset()
    usual = median(behind.values())
    late = {target_id for target_id, part in behind.items() if part > 1 / BEHIND and part > MARKED * usual}
    found: set[str] = set()
    for target_id in late:
        sources = {share.source_id for share in group.shares[target_id]} - {target_id}
        culprits = {name for name in sources if len(readers[name]) > 1 and set(readers[name]) <= late}
        found |= culprits or {target_id}
    return frozenset(name for name in found if name in readers)


def _behind(group: Group, target: Source) -> float:
    """The part of the image that the relays it reads from have of its shares, and it has not.

    A seed has everything from the start: how far one is behind it says nothing.
    """
    total = 0
    for share in group.shares.get(target.instance_id, ()):
        source = group.sources.get(share.source_id)
        if source is not None and not source.complete and source is not target:
            total += count(subtract(intersect(share.chunks, source.verified), target.verified))
    return total / max(1, target.chunk_count)
