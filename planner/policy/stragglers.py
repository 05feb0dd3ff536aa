"""Detection of relays that fall behind their own sources, so that no target waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from planner.policy.background import targets_waited_for
from planner.policy.types import GroupView, Source
from rfork.image.ranges import count, intersect, subtract

MIN_BACKLOG: Final = 1 / 32
"""Fraction of the image by which a slow target is behind its sources, while it follows its first plan."""
MIN_BACKLOG_LATER: Final = 1 / 6
"""The same for a target that has another plan, because it began behind its sources, or that has read faster before."""
MAX_READ: Final = 0.55
"""A slow target has read at most this fraction of what its sources could send since its first plan."""
SLOW_RATE: Final = 0.35
"""A slow target reads at less than this fraction of what its sources could send it."""
FAST_RATE: Final = 0.7
"""A target that reads, or has read, at this fraction of a link does not have a slow one."""
LINK_QUANTILE: Final = 0.6
"""Quantile of the targets' rates, relative to their shares of their sources' links, that counts as the speed of a
link."""


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """Progress of a target with the chunks that it reads from one source."""

    source_id: str
    read: int
    offered: int
    """Chunks that the source has; of a complete source, those that its fastest reader has read."""
    waiting: int
    """Chunks that the source has and the target lacks."""
    link_share: float
    """The target's share of the source's link."""

    @property
    def backlog(self) -> int:
        """Number of chunks that the source offered, besides the next one, and the target has not read."""
        return max(0, self.offered - self.read - 1)


def stragglers(group: GroupView, now: float) -> frozenset[str]:
    """Return relays with readers that fall behind their own sources, by the last reports; pure.

    A target falls behind if chunks wait for it at its sources and it still reads slowly. Sources that are slow or
    behind themselves do not count, nor do background forks, which yield to others. If all readers of one source fall
    behind it, and behind no other, the source is the slow one.
    """
    targets, readers = _targets_and_readers(group, now)
    if not any(target.read_rate for target in targets):
        return frozenset()
    furthest = _furthest_readers(group, targets)
    progress = {target.instance_id: _progress(group, target, readers, furthest) for target in targets}
    rates = sorted(
        target.read_rate / share
        for target in targets
        if target.read_rate and (share := _link_share(progress[target.instance_id]))
    )
    if not rates:
        return frozenset()
    link = rates[int(LINK_QUANTILE * len(rates))]
    delayed = {
        target.instance_id
        for target in targets
        if _follows_first_plan(group, target) and _has_backlog(progress[target.instance_id], 1)
    }
    lagging: dict[str, frozenset[str]] = {}
    for target in targets:
        parts = [part for part in progress[target.instance_id] if part.source_id not in delayed]
        if not target.slow and (ahead := _sources_ahead(group, target, parts, link)):
            lagging[target.instance_id] = ahead
    found: set[str] = set()
    for target_id, ahead in lagging.items():
        slow_sources = {
            name
            for name in ahead
            if len(readers[name]) > 1
            and sum(group.sources[reader].read_rate or 0.0 for reader in readers[name]) < SLOW_RATE * link
            and all(_lags_only(name, lagging.get(reader), progress[reader]) for reader in readers[name])
        }
        found |= slow_sources or {target_id}
    return frozenset(name for name in found if name in readers)


def _targets_and_readers(group: GroupView, now: float) -> tuple[list[Source], dict[str, list[str]]]:
    """Return the targets that others may wait for, and the targets that read from each source."""
    waited_for: AbstractSet[str] = frozenset()
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
    return targets, readers


def _furthest_readers(group: GroupView, targets: Sequence[Source]) -> dict[str, int]:
    """Return the chunks that the fastest reader of each complete source has read from it."""
    furthest: dict[str, int] = {}
    for target in targets:
        for share in group.shares[target.instance_id]:
            source = group.sources.get(share.source_id)
            if source is not None and source.complete:
                read = count(intersect(share.chunks, target.verified))
                furthest[share.source_id] = max(read, furthest.get(share.source_id, 0))
    return furthest


def _progress(
    group: GroupView, target: Source, readers: Mapping[str, Sequence[str]], furthest: Mapping[str, int]
) -> list[SourceProgress]:
    """Return the progress of a target with each of its sources, except slow relays."""
    found: list[SourceProgress] = []
    for share in group.shares[target.instance_id]:
        source = group.sources.get(share.source_id)
        if source is None or source is target or source.is_slow_relay:
            continue
        available = intersect(share.chunks, source.verified)
        found.append(
            SourceProgress(
                source_id=share.source_id,
                read=count(intersect(share.chunks, target.verified)),
                offered=furthest[share.source_id] if source.complete else count(available),
                waiting=count(subtract(available, target.verified)),
                link_share=1 / len(readers[share.source_id]),
            )
        )
    return found


def _link_share(parts: Sequence[SourceProgress]) -> float:
    """Return the fraction of a link at which a target's sources can send what they have."""
    return min(1.0, sum(part.link_share for part in parts if part.offered))


def _follows_first_plan(group: GroupView, target: Source) -> bool:
    """Return True if the target has read all of its chunks by its current plan, which covers the complete image."""
    return sum(count(share.chunks) for share in group.shares[target.instance_id]) == target.chunk_count


def _has_backlog(parts: Sequence[SourceProgress], min_backlog: float) -> bool:
    """Return True if the target has read a part only of what some of its sources offered."""
    late = [part for part in parts if part.backlog]
    read, offered = sum(part.read for part in late), sum(part.offered for part in late)
    return sum(part.backlog for part in late) >= min_backlog and read <= MAX_READ * offered


def _sources_ahead(group: GroupView, target: Source, parts: Sequence[SourceProgress], link: float) -> frozenset[str]:
    """Return the sources that the target falls behind; none if it reads as fast as they can send, or has only
    begun.
    """
    if target.read_rate is None or not target.verified:
        return frozenset()
    if (
        (target.ingress_rate or 0.0) < FAST_RATE * link
        and target.read_rate < FAST_RATE * _link_share(parts) * link
        and _follows_first_plan(group, target)
        and _has_backlog(parts, MIN_BACKLOG * target.chunk_count)
    ):
        return frozenset(part.source_id for part in parts if part.backlog)
    late = [part for part in parts if part.waiting > 1]
    if (
        target.read_rate >= SLOW_RATE * _link_share(late) * link
        or sum(part.waiting - 1 for part in late) < MIN_BACKLOG_LATER * target.chunk_count
    ):
        return frozenset()
    return frozenset(part.source_id for part in late)


def _lags_only(name: str, ahead: frozenset[str] | None, parts: Sequence[SourceProgress]) -> bool:
    """Return True if a reader of this source falls behind it alone, and reads from its other sources, if any."""
    others = [part for part in parts if part.source_id != name]
    return ahead == frozenset({name}) and (not others or any(part.read for part in others))
