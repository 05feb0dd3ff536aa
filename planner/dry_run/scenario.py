"""Input of a preview: the known state of one rank of a model, and hypothetical replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from planner.core.group_history import origin_of
from planner.core.group_index import GroupIndex
from planner.core.records import ForkRecord
from planner.core.state import PlannerState
from planner.policy.types import ForkDemand, GroupView, HostLocation, Source, Storage
from rfork.schema import SAME_HOST_TRANSPORTS, ForkProgress, PreviewRequest, source_type

DEFAULT_LINK_RATE: Final = 1.25e9
"""Assumed link speed of a host in bytes per second, if unknown: 10 Gbit/s."""
DEFAULT_STORAGE_RATE: Final = 1e9
MIN_RATE: Final = 1.0
"""Lower rates in bytes per second, which an instance may report, would make a duration infinite."""
UNKNOWN_ORIGIN: Final = "0" * 32
"""Stands for the files of a checkpoint, and for the weights of a snapshot that was never read completely."""


@dataclass(frozen=True)
class GroupSnapshot:
    """One rank of a model at one moment, as immutable values that another thread may read."""

    request: PreviewRequest
    now: float
    group: GroupView
    """The policy's view for these replicas; empty if a cold start is requested."""
    sources: Mapping[str, Source]
    """All members, by instance_id."""
    forks: Sequence[ForkRecord]
    """Forks of this and other ranks."""
    template: Source
    """The member that the replicas resemble."""
    image_bytes: int
    storage_s: float | None
    """Time to load from storage, if known."""


@dataclass(frozen=True)
class Scenario:
    """Input of a preview."""

    group: GroupView
    demands: tuple[ForkDemand, ...]
    """Requests of the hypothetical replicas, without storage."""
    storage: tuple[Storage, ...]
    """Storage that they could read."""
    image_bytes: int
    seeds: int
    link_rate: float
    """Bytes per second in one direction of a host's link."""
    is_link_measured: bool
    """True if forks measured `link_rate`."""
    storage_rate: float
    """Bytes per second that one replica reads from storage."""
    now: float


def snapshot_group(state: PlannerState, index: GroupIndex, request: PreviewRequest, now: float) -> GroupSnapshot | None:
    """Copy the group, on the event loop, which it blocks for a few copies.

    Returns None if the size of the image is unknown.
    """
    template = _template_member(index)
    record = None if template is None else state.instance(template.instance_id)
    if template is None or record is None:
        return None
    if request.cold:
        group = GroupView(index.model, index.rank_key, {}, version=index.version)
    else:
        # One demand represents all: they differ only by their hosts, which have no members.
        first, others = _demand(template, request, 0), state.other_ranks(index.key)
        group = _frozen_view(index.view((first,), others, together=request.targets))
    return GroupSnapshot(
        request=request,
        now=now,
        group=group,
        sources=dict(index.sources),
        forks=state.forks(),
        template=template,
        image_bytes=record.report.image_bytes,
        storage_s=index.history.storage_s,
    )


def build_scenario(group_snapshot: GroupSnapshot) -> Scenario:
    """Return the input of a preview for all requested replicas."""
    request, group, template = group_snapshot.request, group_snapshot.group, group_snapshot.template
    sources, now = group_snapshot.sources, group_snapshot.now
    forks = [fork for fork in group_snapshot.forks if fork.group == (group.model, group.version, group.rank_key)]
    measured_rate = _max_throughput(sources, forks)
    storage_rate = DEFAULT_STORAGE_RATE
    if group_snapshot.storage_s:
        storage_rate = max(MIN_RATE, group_snapshot.image_bytes / group_snapshot.storage_s)
    return Scenario(
        group=group,
        demands=tuple(_demand(template, request, number) for number in range(request.targets)),
        storage=_storage_candidates(sources, forks, rate_is_set=request.storage_bytes_per_s is not None),
        image_bytes=group_snapshot.image_bytes,
        seeds=0 if request.cold else sum(_can_serve(source, template, now) for source in sources.values()),
        link_rate=request.link_bytes_per_s or measured_rate or DEFAULT_LINK_RATE,
        is_link_measured=request.link_bytes_per_s is None and measured_rate is not None,
        storage_rate=request.storage_bytes_per_s or storage_rate,
        now=now,
    )


def _template_member(index: GroupIndex) -> Source | None:
    """Return the member that the replicas resemble: of the layout with the most seeds, then the most members."""
    layouts: dict[str, list[Source]] = {}
    for source in index.sources.values():
        layouts.setdefault(source.layout_id, []).append(source)
    members = max(layouts.values(), key=lambda each: (sum(source.complete for source in each), len(each)), default=[])
    return max(members, key=lambda source: (source.complete, source.instance_id), default=None)


def _can_serve(source: Source, template: Source, now: float) -> bool:
    same_layout = (source.layout_id, source.chunk_count) == (template.layout_id, template.chunk_count)
    return same_layout and source.complete and source.state != "draining" and now >= source.quarantined_until


def _demand(template: Source, request: PreviewRequest, number: int) -> ForkDemand:
    """Return the demand of one replica, counted from 0."""
    digits = len(str(request.targets))
    name = f"preview-{number + 1:0{digits}}"
    host = f"preview-host-{number // request.per_host + 1:0{digits}}"
    target = replace(
        template,
        instance_id=name,
        address="",
        weights_id=None,
        generation=0,
        state="loading",
        verified=(),
        location=HostLocation(host, request.rack, request.zone),
        expires_at=math.inf,
        provisional_id=None,
        storage=(),
        ingress_rate=None,
        slow=False,
        quarantined_until=0.0,
        quarantine="",
    )
    return ForkDemand(name, target)


def _frozen_view(group: GroupView) -> GroupView:
    """Return a copy of the view that the planner no longer changes."""
    return replace(
        group,
        sources=dict(group.sources),
        readers={name: dict(readers) for name, readers in group.readers.items()},
        same_host_readers={name: frozenset(forks) for name, forks in group.same_host_readers.items()},
        shares=dict(group.shares),
        content_counts=None if group.content_counts is None else dict(group.content_counts),
    )


def _max_throughput(sources: Mapping[str, Source], forks: Iterable[ForkRecord]) -> float | None:
    """Return the fastest rate at which a fork of the group read from other hosts."""
    rates = [source.ingress_rate or 0.0 for source in sources.values()]
    for fork in forks:
        last = fork.finish or fork.progress
        if last is None or not last.link_bytes_per_s or SAME_HOST_TRANSPORTS.intersection(last.transports.values()):
            continue
        if isinstance(last, ForkProgress):
            from_peers = all(source_type(name) == "peer" for name in last.sources)
        else:
            from_peers = origin_of(last) == "peers"
        if from_peers:
            rates.append(last.link_bytes_per_s)
    fastest = max(rates, default=0.0)
    return fastest if fastest >= MIN_RATE else None


def _storage_candidates(
    sources: Mapping[str, Source], forks: Iterable[ForkRecord], *, rate_is_set: bool
) -> tuple[Storage, ...]:
    """Return the storage that instances of the group could read or have read, as replicas probably can too.

    `rate_is_set`: the request contains a storage rate, so a snapshot is assumed if nothing is known.
    """
    for source in sources.values():
        if source.storage:
            return source.storage
    for fork in sorted(forks, key=lambda each: each.requested_at, reverse=True):
        for read in fork.storage:
            return (_storage_entry(read.kind, read.uri, fork.weights_id),)
        last = fork.finish or fork.progress
        bytes_by_source: Mapping[str, int] = last.sources if last is not None else {}
        for name in bytes_by_source:
            type_name = source_type(name)
            if type_name != "peer":
                return (_storage_entry(type_name, name.partition(":")[2], fork.weights_id),)
    return (_storage_entry("snapshot", "", None),) if rate_is_set else ()


def _storage_entry(storage_type: str, uri: str, weights_id: str | None) -> Storage:
    if storage_type == "snapshot":
        return Storage("snapshot", uri, UNKNOWN_ORIGIN, weights_id or UNKNOWN_ORIGIN)
    return Storage("checkpoint", uri, UNKNOWN_ORIGIN) if storage_type == "checkpoint" else Storage("loader", uri)
