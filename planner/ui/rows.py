"""What the page is told of an instance and of a fork: a row of plain values, without those that are empty.

Sizes in bytes, rates in bytes a second, ages as seconds on the store's clock, chunks as counts. Names and
reasons are as callers gave them: whoever shows them takes them for text, never for markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from pydantic import JsonValue

from planner.store.records import ForkRecord, InstanceRecord
from rfork.image.ranges import count, normalise

Row = dict[str, JsonValue]

Amount = TypeVar("Amount", int, float)

MOST_SOURCES: Final = 24
"""Sources of one fork that a row names: those that gave most."""
MOST_REASONS: Final = 6
"""The last failures on a fork's way."""


def instance_row(record: InstanceRecord, now: float, silent_s: float) -> Row:
    """An instance; `silent`: nothing was heard of it for `silent_s` seconds."""
    report, source = record.report, record.source
    placement = report.placement
    return _told(
        id=report.instance_id,
        model=report.model,
        version=record.version,
        rank=report.rank.key,
        dp=report.rank.dp,
        state=source.state,
        host=placement.host,
        rack=placement.rack,
        zone=placement.zone,
        pod=placement.pod,
        weights=report.weights_id,
        generation=report.generation,
        bytes=report.image_bytes,
        chunks=report.chunk_count,
        verified=source.watermark,
        slots=report.max_readers,
        readers=len(report.readers),
        egress=report.egress_rate,
        transports=list(report.transports),
        storage=[offer.kind for offer in report.storage],
        quarantine=record.quarantine if now < record.quarantined_until else None,
        quarantined_until=record.quarantined_until if now < record.quarantined_until else None,
        missing=record.missing,
        slow=record.slow_since is not None,
        silent=now >= record.seen_at + silent_s,
        since=round(record.since, 1),
    )


def changes_at(record: InstanceRecord, now: float, silent_s: float) -> float:
    """When the row becomes another one although nothing is heard of the instance."""
    times = (record.seen_at + silent_s, record.quarantined_until)
    return min((at for at in times if at > now), default=float("inf"))


def fork_row(record: ForkRecord) -> Row:
    """A fork: its plan as chunks by source (its own id: its storage), how far it is, how it ended.

    `rates` are those of its sources: now, while it is under way; at best, once it has ended.
    """
    progress, finish = record.progress, record.finish
    told = finish or progress
    if finish is not None and finish.outcome == "forked":
        verified = record.chunk_count
    else:
        verified = count(normalise(progress.verified)) if progress else 0
    row = _told(
        id=record.fork_id,
        instance=record.instance_id,
        model=record.model,
        version=record.version,
        rank=record.rank.key,
        state=record.state,
        bytes=record.image_bytes,
        chunks=record.chunk_count,
        asked=round(record.asked_at, 2),
        heard=round(record.seen_at, 2),
        reason=record.reason,
        plan=_plan(record),
        storage={f"{read.kind}:{read.uri}": count(read.chunks) for read in record.storage},
        verified=verified,
        held=dict(record.held),
        lost=record.lost,
    )
    if told is not None:
        row |= _told(
            read=told.bytes_read,
            sources=_most(told.sources),
            rates={name: round(rate) for name, rate in _most(told.source_bytes_per_s).items()},
            link=told.link_bytes_per_s,
            transports=_named(told.transports, told.sources),
            phases=dict(told.phases or (progress.phases if progress else {})),
        )
    if finish is not None:
        row |= _told(
            outcome=finish.outcome,
            seconds=finish.seconds,
            fallback=finish.fallback,
            reasons=list(finish.reasons[-MOST_REASONS:]),
            efficiency=finish.efficiency,
            repeated=finish.bytes_repeated,
            replans=finish.replans,
        )
    elif progress is not None:
        row |= _told(rate=round(progress.bytes_per_s))
    return row


def changed(old: Row | None, new: Row) -> Row:
    """What of a row is new, with its id; None for what is no more. All of it where none is old."""
    if old is None:
        return new
    fields = {name: value for name, value in new.items() if old.get(name) != value}
    fields.update((name, None) for name in old.keys() - new.keys())
    if fields:
        fields["id"] = new["id"]
    return fields


def _plan(record: ForkRecord) -> dict[str, int]:
    chunks = {read.source_id: count(read.chunks) for read in record.reads}
    own = sum(count(read.chunks) for read in record.storage)
    return chunks | ({record.instance_id: own} if own else {})


def _most(sources: Mapping[str, Amount]) -> dict[str, Amount]:
    """The sources that gave most, or fastest; in the order in which they were told, where they are few."""
    if len(sources) <= MOST_SOURCES:
        return dict(sources)
    return dict(sorted(sources.items(), key=lambda item: -item[1])[:MOST_SOURCES])


def _named(transports: Mapping[str, str], sources: Mapping[str, int]) -> dict[str, str]:
    return {
        name: over for name, over in transports.items() if len(transports) <= MOST_SOURCES or name in sources
    }


def _told(**values: object) -> Row:
    """Leaves out what is None, 0, empty or False: the page takes a missing field for that."""
    return {name: value for name, value in values.items() if value}  # type: ignore[misc]  # plain values all
