"""Registry of holders, and the results of their prefetches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Final, Literal

from planner.core.records import ForkRecord, HolderRecord, InstanceRecord
from rfork.schema import ForkResult, HolderReport, ImageKey, ImageSelector, WantedImage

PrefetchResult = Literal["used", "unused", "wrong_layout"]


class Holders:
    """All holders, by id and by host."""

    def __init__(self) -> None:
        self._records: dict[str, HolderRecord] = {}
        self._by_host: dict[str, dict[str, None]] = {}

    def apply(self, records: Iterable[HolderRecord], removed: Iterable[str]) -> None:
        """Insert or replace holders, and remove others."""
        for holder_id in removed:
            self._remove(holder_id)
        for record in records:
            self._remove(record.holder_id)
            self._records[record.holder_id] = record
            self._by_host.setdefault(record.report.placement.host, {})[record.holder_id] = None

    def get(self, holder_id: str) -> HolderRecord | None:
        """Return the holder's record, if it is known."""
        return self._records.get(holder_id)

    def all(self) -> list[HolderRecord]:
        """Return all holders, ordered by id."""
        return [self._records[holder_id] for holder_id in sorted(self._records)]

    @property
    def count(self) -> int:
        """Number of known holders."""
        return len(self._records)

    def on_host(self, host: str) -> list[HolderRecord]:
        """Return the holders on a host, ordered by id."""
        return [self._records[holder_id] for holder_id in sorted(self._by_host.get(host, ()))]

    def starting_on(self, host: str) -> list[ImageSelector]:
        """Return the weights of engines that start on a host, as selected by holders without memory."""
        return [
            selector
            for record in self.on_host(host)
            if not (record.report.memory_bytes or record.report.follows_host)
            for selector in record.report.selectors
        ]

    def overdue(self, now: float) -> Iterator[HolderRecord]:
        """Return the holders whose TTL has expired."""
        return (record for record in self._records.values() if now >= record.expires_at)

    def is_lasting(self, instance: InstanceRecord) -> bool:
        """Return True unless a holder keeps the instance's image for the start of one engine only.

        Of a holder that is not known it is not known either, so its images do not count as lasting.
        """
        if instance.report.holder is None:
            return True
        holder = self._records.get(instance.report.holder)
        return holder is not None and holder.report.follows_host

    def _remove(self, holder_id: str) -> None:
        old = self._records.pop(holder_id, None)
        if old is not None:
            host = old.report.placement.host
            del self._by_host[host][holder_id]
            if not self._by_host[host]:
                del self._by_host[host]


MAX_AGE_FRACTION: Final = 0.8
"""Fraction of the heartbeat interval after which a report without changes is stored again."""


def is_worth_storing(record: HolderRecord, known: HolderRecord | None, heartbeat_s: float) -> bool:
    """Return True unless the known record differs only in times, by less than a heartbeat.

    Holders report more often than instances, so that they see an announcement soon.
    """
    if known is None or record.seen_at - known.seen_at >= MAX_AGE_FRACTION * heartbeat_s:
        return True
    timeless = replace(record, seen_at=known.seen_at, report=_without_times(record.report))
    return timeless != replace(known, report=_without_times(known.report))


def _without_times(report: HolderReport) -> HolderReport:
    images = tuple(image.model_copy(update={"idle_s": 0.0}) for image in report.images)
    return report.model_copy(update={"images": images})


def prefetched_images(
    known: HolderRecord | None,
    report: HolderReport,
    wanted: Iterable[WantedImage],
    engine_images: Collection[ImageKey],
) -> tuple[ImageKey, ...]:
    """Return the images that a holder has because they were announced, and that no engine has used yet.

    `engine_images`: complete images of engines on its host. The holder keeps these anyway, so a new one is no prefetch.
    """
    before = set(known.prefetched) if known is not None else set()
    old = {ImageKey.of(image) for image in known.report.images} if known is not None else set()
    announced = {ImageKey.of(image) for image in wanted if image.cause == "announced"}
    unused = (ImageKey.of(image) for image in report.images if not image.used)
    return tuple(
        key for key in unused if key in before or (key in announced and key not in old and key not in engine_images)
    )


def unused_prefetches(known: HolderRecord, report: HolderReport | None) -> int:
    """Return how many prefetched images a holder no longer has (`report`: None for none) that were never used."""
    kept = {ImageKey.of(image) for image in report.images} if report is not None else set()
    return sum(key not in kept for key in known.prefetched)


def prefetch_results(
    fork: ForkRecord,
    finish: ForkResult,
    layout_id: str,
    holders: Iterable[HolderRecord],
    local_images: Iterable[InstanceRecord],
) -> tuple[PrefetchResult | None, tuple[HolderRecord, ...]]:
    """Return what a finished fork of an engine shows about the prefetches on its host, and the holders' new records.

    `layout_id`: the engine's layout. `holders`: those on its host. `local_images`: the fork's sources on its host that
    holders keep. An image counts only once as prefetched, whatever becomes of it.
    """
    if any(finish.sources.get(image.report.instance_id) for image in local_images):
        key = ImageKey(fork.model, fork.version, fork.rank.key, layout_id)
        return "used", tuple(_without(holder, {key}) for holder in holders if key in holder.prefetched)
    rank = (fork.model, fork.version, fork.rank.key)
    wrong = {key for holder in holders for key in holder.prefetched if key[:3] == rank}
    if not wrong or any(key.layout_id == layout_id for key in wrong):
        return None, ()
    return "wrong_layout", tuple(_without(holder, wrong) for holder in holders if wrong & set(holder.prefetched))


def _without(holder: HolderRecord, keys: set[ImageKey]) -> HolderRecord:
    return replace(holder, prefetched=tuple(key for key in holder.prefetched if key not in keys))
