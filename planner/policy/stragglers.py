"""Detection of targets with slow links, so that no target waits for them.

A target whose reads are slow while its sources have chunks for it has a slow link, unless its sources do: that is
known once a source receives, or sends to others, at the speed of a link. Until then, a target counts as slow if its
first sources have offered it far more chunks than it has read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, NamedTuple

from planner.policy.background import targets_waited_for
from planner.policy.types import GroupView, Source
from rfork.image.ranges import count, intersect, subtract

LINK_QUANTILE: Final = 0.6
"""Quantile of the sources' link rates, as their readers see them, that counts as the speed of a link."""
FAST_READ: Final = 0.6
"""A target does not have a slow link if it reads from some source at this fraction of its share of a link, or..."""
FAST_READS: Final = 0.45
"""...from all of its sources together at this fraction of a link."""
FAST_LINK: Final = 0.8
"""A source that sends, or receives, this fraction of what a link allows does not have a slow one."""
MIN_BACKLOG: Final = 1 / 32
"""Fraction of the image by which a slow target is behind its first sources."""
MAX_READ: Final = 0.55
"""A slow target has read at most this fraction of what they offered."""


class ActiveRead(NamedTuple):
    """Rate at which a target reads from a source while the source has chunks for it."""

    bytes_per_s: float
    link_share: float
    """The target's share of the source's link."""

    @property
    def link_rate(self) -> float:
        """Rate of the source's link, if all of its readers get the same."""
        return self.bytes_per_s / self.link_share


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """Progress of a target with the chunks that it reads from one source."""

    source_id: str
    read: int
    offered: int
    """Chunks that the source has; of a complete source, those that its fastest reader has read."""

    @property
    def backlog(self) -> int:
        """Number of chunks that the source offered, besides the next one, and the target has not read."""
        return max(0, self.offered - self.read - 1)


class SlowReports:
    """Confirms that targets are slow: two reports in a row must show it, because one during a pause does too.

    A pure state machine.
    """

    def __init__(self) -> None:
        self._slow_since: dict[str, float] = {}
        """Time of the first report in a row that showed the target to be slow."""

    def confirmed(self, suspects: Mapping[str, float]) -> list[str]:
        """Return the suspects that an earlier report showed too. `suspects`: all `stragglers` now, with the times of
        their last reports.
        """
        self._slow_since = {name: self._slow_since.get(name, reported_at) for name, reported_at in suspects.items()}
        return [name for name, reported_at in suspects.items() if reported_at > self._slow_since[name]]


def stragglers(group: GroupView, now: float) -> frozenset[str]:
    """Return relays with slow links that targets wait for, by the last reports; pure. See `SlowReports`.

    Background forks do not count: they yield to others.
    """
    targets, readers = _targets_and_readers(group, now)
    if not any(target.read_rate for target in targets):
        return frozenset()
    links = ReadRates(group, targets)
    furthest = _furthest_readers(group, targets)
    on_first_plan = [target for target in targets if _follows_first_plan(group, target)]
    progress = {target.instance_id: _progress(group, target, furthest) for target in on_first_plan}
    delayed = {name for name, parts in progress.items() if _has_backlog(parts, 1)}
    found = links.slow_targets()
    for target in on_first_plan:
        parts = [part for part in progress[target.instance_id] if part.source_id not in delayed]
        if (
            target.read_rate is not None
            and target.verified
            and not links.reads_fast(target)
            and _has_backlog(parts, MIN_BACKLOG * target.chunk_count)
        ):
            found.add(target.instance_id)
    return frozenset(name for name in found if name in readers)


class ReadRates:
    """Rates of a group's reads, relative to the speed of a link."""

    def __init__(self, group: GroupView, targets: Sequence[Source]) -> None:
        """`targets` are those whose reports count."""
        self._targets = targets
        self._sources = group.sources
        self._reads = _active_reads(group, targets)
        self._readers: dict[str, list[str]] = {}
        for target_id, reads in self._reads.items():
            for source_id in reads:
                self._readers.setdefault(source_id, []).append(target_id)
        # The lowest of each target: a rate is an upper bound until the first chunk has arrived.
        rates = sorted(
            min(read.link_rate for read in self._reads[target.instance_id].values())
            for target in targets
            if target.verified and target.instance_id in self._reads
        )
        self._link = rates[int(LINK_QUANTILE * len(rates))] if rates else None

    def reads_fast(self, target: Source) -> bool:
        """Return True if a target reads about as fast as a link allows, while its sources have chunks for it."""
        reads = self._reads.get(target.instance_id)
        if reads is None or self._link is None:
            return False
        return (target.active_rate or 0.0) >= FAST_READS * self._link or any(
            read.link_rate >= FAST_READ * self._egress(source_id, self._link) for source_id, read in reads.items()
        )

    def slow_targets(self) -> set[str]:
        """Return the targets that read slowly, after their last plan, from sources with fast links."""
        return {
            target.instance_id
            for target in self._targets
            if target.read_rate is not None
            and (reads := self._reads.get(target.instance_id))
            and not self.reads_fast(target)
            and all(self._has_fast_link(source_id) for source_id in reads)
        }

    def _has_fast_link(self, source_id: str) -> bool:
        """Return True if a source receives, or sends to some target, at the speed of a link."""
        source = self._sources[source_id]
        if source.slow or self._link is None:
            return False
        own = self._reads.get(source_id)
        if own is not None and source.verified:
            share = min(1.0, sum(read.link_share for read in own.values()))
            if (source.active_rate or 0.0) >= max(FAST_LINK * share, FAST_READS) * self._link:
                return True
        fast = FAST_LINK * self._egress(source_id, self._link)
        return any(self._reads[reader][source_id].link_rate >= fast for reader in self._readers[source_id])

    def _egress(self, source_id: str, link: float) -> float:
        """Return the rate at which a source sends over a fast link: its limit, if it has a lower one."""
        limit = self._sources[source_id].egress_rate
        return link if limit is None else min(link, limit)


def _active_reads(group: GroupView, targets: Sequence[Source]) -> dict[str, dict[str, ActiveRead]]:
    """Return the reads of each target from its peers, by target and source."""
    readers = Counter(
        share.source_id
        for target in targets
        for share in group.shares[target.instance_id]
        if subtract(share.chunks, target.verified)
    )
    found: dict[str, dict[str, ActiveRead]] = {}
    for target in targets:
        for share in group.shares[target.instance_id]:
            rate = target.source_rates.get(share.source_id)
            if rate is not None and share.source_id in group.sources:
                read = ActiveRead(rate, 1 / max(1, readers[share.source_id]))
                found.setdefault(target.instance_id, {})[share.source_id] = read
    return found


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


def _progress(group: GroupView, target: Source, furthest: Mapping[str, int]) -> list[SourceProgress]:
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
            )
        )
    return found


def _follows_first_plan(group: GroupView, target: Source) -> bool:
    """Return True if the target has read all of its chunks by its current plan, which covers the complete image."""
    return sum(count(share.chunks) for share in group.shares[target.instance_id]) == target.chunk_count


def _has_backlog(parts: Sequence[SourceProgress], min_backlog: float) -> bool:
    """Return True if the target has read a part only of what some of its sources offered."""
    late = [part for part in parts if part.backlog]
    read, offered = sum(part.read for part in late), sum(part.offered for part in late)
    return sum(part.backlog for part in late) >= min_backlog and read <= MAX_READ * offered
