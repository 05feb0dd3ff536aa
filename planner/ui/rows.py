"""Rows of the page: an instance or a fork as plain values, without empty ones.

Sizes in bytes, rates in bytes per second, ages in seconds on the store's clock, chunks as counts. Names and
reasons are unescaped caller input: show them as text, never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from pydantic import JsonValue

from planner.core.records import ForkRecord, InstanceRecord
from rfork.image.ranges import count, normalise

Row = dict[str, JsonValue]

Amount = TypeVar("Amount", int, float)

MAX_SOURCES: Final = 24
"""Maximum number of sources per fork in a row: those that sent the most."""
MAX_REASONS: Final = 6
"""Number of failures of a fork in a row: the last ones."""


def instance_row(record: InstanceRecord, now: float, silent_s: float) -> Row:
    """Return the row of an instance; `silent`: no report for `silent_s` seconds."""
    report, source = record.report, record.source
    placement = report.placement
    return _non_empty(
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
        holder=report.holder is not None,
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
        missing=record.reported_missing,
        slow=record.slow_since is not None,
        silent=now >= record.seen_at + silent_s,
        since=round(record.since, 1),
    )


def next_change_at(record: InstanceRecord, now: float, silent_s: float) -> float:
    """Return the time at which the row changes even without a report of the instance."""
    times = (record.seen_at + silent_s, record.quarantined_until)
    return min((at for at in times if at > now), default=float("inf"))


def fork_row(record: ForkRecord) -> Row:
    """Return the row of a fork: its plan as chunks by source (its own id: its storage), progress, and result.

    `rates` are those of its sources: current ones while it is running, maximum ones once it has finished.
    """
    progress, finish = record.progress, record.finish
    status = finish or progress
    if finish is not None and finish.outcome == "forked":
        verified = record.chunk_count
    else:
        verified = count(normalise(progress.verified)) if progress else 0
    row = _non_empty(
        id=record.fork_id,
        instance=record.instance_id,
        model=record.model,
        version=record.version,
        rank=record.rank.key,
        state=record.state,
        bytes=record.image_bytes,
        chunks=record.chunk_count,
        requested_at=round(record.requested_at, 2),
        seen_at=round(record.seen_at, 2),
        reason=record.reason,
        plan=_plan(record),
        storage={f"{read.kind}:{read.uri}": count(read.chunks) for read in record.storage},
        verified=verified,
        source_rate_limits=dict(record.source_rate_limits),
        abandoned=record.abandoned,
    )
    if status is not None:
        row |= _non_empty(
            read=status.bytes_read,
            sources=_top_sources(status.sources),
            rates={name: round(rate) for name, rate in _top_sources(status.source_bytes_per_s).items()},
            link=status.link_bytes_per_s,
            transports=_named(status.transports, status.sources),
            phases=dict(status.phases or (progress.phases if progress else {})),
        )
    if finish is not None:
        row |= _non_empty(
            outcome=finish.outcome,
            seconds=finish.seconds,
            fallback=finish.fallback,
            reasons=list(finish.reasons[-MAX_REASONS:]),
            efficiency=finish.efficiency,
            repeated=finish.bytes_repeated,
            replans=finish.replans,
        )
    elif progress is not None:
        row |= _non_empty(rate=round(progress.bytes_per_s))
    return row


def row_diff(old: Row | None, new: Row) -> Row:
    """Return the changed fields of a row, with its id, and None for removed fields; the entire row if `old`
    is None.
    """
    if old is None:
        return new
    fields = {name: value for name, value in new.items() if old.get(name) != value}
    fields.update((name, None) for name in old.keys() - new.keys())
    if fields:
        fields["id"] = new["id"]
    return fields


def _plan(record: ForkRecord) -> dict[str, int]:
    chunks = {read.source_id: count(read.chunks) for read in record.reads}
    own_storage = sum(count(read.chunks) for read in record.storage)
    return chunks | ({record.instance_id: own_storage} if own_storage else {})


def _top_sources(sources: Mapping[str, Amount]) -> dict[str, Amount]:
    """Return the sources that sent the most, or the fastest; in the reported order if they are few."""
    if len(sources) <= MAX_SOURCES:
        return dict(sources)
    return dict(sorted(sources.items(), key=lambda item: -item[1])[:MAX_SOURCES])


def _named(transports: Mapping[str, str], sources: Mapping[str, int]) -> dict[str, str]:
    return {
        name: transport for name, transport in transports.items() if len(transports) <= MAX_SOURCES or name in sources
    }


def _non_empty(**values: object) -> Row:
    """Return the values without those that are None, 0, empty or False: the page treats missing fields as
    such.
    """
    return {name: value for name, value in values.items() if value}  # type: ignore[misc]  # plain values all
