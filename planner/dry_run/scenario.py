"""What a preview goes by: what is known of one rank of a model, and replicas that do not exist."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from planner.fork_stats import origin_of
from planner.group_index import GroupIndex
from planner.policy_types import ForkDemand, GroupView, HostLocation, Source, Storage
from planner.state import PlannerState
from planner.store.records import ForkRecord
from rfork.schema import ForkProgress, PreviewRequest, source_kind
from rfork.schema.types import SAME_HOST_TRANSPORTS

DEFAULT_LINK_RATE: Final = 1.25e9
"""Bytes a second of a host's link where nobody knows it: 10 Gbit/s."""
DEFAULT_STORAGE_RATE: Final = 1e9
ORIGIN: Final = "0" * 32
"""Stands for the files of a checkpoint, and for the weights of a snapshot that nobody has read to its end."""


@dataclass(frozen=True)
class GroupSnapshot:
    """One rank of a model at one moment, by values that nothing changes any more: a thread may read them."""

    request: PreviewRequest
    now: float
    group: GroupView
    """As the policy sees it for these replicas; empty where the request is for a cold start."""
    sources: Mapping[str, Source]
    """All members."""
    forks: Sequence[ForkRecord]
    """Of this rank and of others."""
    template: Source
    """The member that the replicas are taken to be like."""
    image_bytes: int
    storage_s: float | None
    """How long storage takes, where that is known."""


@dataclass(frozen=True)
class Scenario:
    """What a preview goes by."""

    group: GroupView
    demands: tuple[ForkDemand, ...]
    """Of the replicas that would come, with nothing to read by themselves."""
    storage: tuple[Storage, ...]
    """What they could read by themselves."""
    image_bytes: int
    seeds: int
    link: float
    measured: bool
    """Whether that is the speed of a link that forks measured."""
    storage_rate: float
    now: float


def take_group_snapshot(
    state: PlannerState, live: GroupIndex, request: PreviewRequest, now: float
) -> GroupSnapshot | None:
    """Taken on the event loop, which it holds for a few copies.

    None where nobody tells how large the image is.
    """
    template = _template_member(live)
    record = None if template is None else state.instance(template.instance_id)
    if template is None or record is None:
        return None
    if request.cold:
        group = GroupView(live.model, live.rank_key, {}, version=live.version)
    else:
        # The first stands for all: but for their hosts, where nobody is, they are alike.
        first, others = _demand(template, request, 0), state.other_ranks(live.key)
        group = _frozen_view(live.view((first,), others, together=request.targets))
    return GroupSnapshot(
        request,
        now,
        group,
        dict(live.sources),
        state.forks(),
        template,
        record.report.image_bytes,
        live.history.durations.storage_s,
    )


def build_scenario(group_snapshot: GroupSnapshot) -> Scenario:
    """What a preview goes by, for all that were asked about."""
    request, group, template = group_snapshot.request, group_snapshot.group, group_snapshot.template
    forks = [fork for fork in group_snapshot.forks if fork.group == (group.model, group.version, group.rank_key)]
    fastest = _max_throughput(group_snapshot.sources, forks)
    storage_rate = (
        group_snapshot.image_bytes / group_snapshot.storage_s if group_snapshot.storage_s else DEFAULT_STORAGE_RATE
    )
    return Scenario(
        group,
        tuple(_demand(template, request, number) for number in range(request.targets)),
        _storage_candidates(group_snapshot.sources, forks, rate_is_set=request.storage_bytes_per_s is not None),
        group_snapshot.image_bytes,
        0
        if request.cold
        else sum(_can_serve(each, template, group_snapshot.now) for each in group_snapshot.sources.values()),
        request.link_bytes_per_s or fastest or DEFAULT_LINK_RATE,
        request.link_bytes_per_s is None and fastest is not None,
        request.storage_bytes_per_s or storage_rate,
        group_snapshot.now,
    )


def _template_member(live: GroupIndex) -> Source | None:
    """Whom the replicas are like: a member of the layout that most seeds have, then most members."""
    layouts: dict[str, list[Source]] = {}
    for source in live.sources.values():
        layouts.setdefault(source.layout_id, []).append(source)
    largest_layout = max(
        layouts.values(), key=lambda each: (sum(source.complete for source in each), len(each)), default=[]
    )
    return max(largest_layout, key=lambda source: (source.complete, source.instance_id), default=None)


def _can_serve(source: Source, template: Source, now: float) -> bool:
    same_layout = (source.layout_id, source.chunk_count) == (template.layout_id, template.chunk_count)
    return same_layout and source.complete and source.state != "draining" and now >= source.quarantined_until


def _demand(template: Source, request: PreviewRequest, number: int) -> ForkDemand:
    """Of one of the replicas, the first being 0."""
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
    """The group as it is now: what the planner changes, it changes elsewhere."""
    return replace(
        group,
        sources=dict(group.sources),
        readers={name: dict(readers) for name, readers in group.readers.items() if readers},
        same_host_readers={name: frozenset(forks) for name, forks in group.same_host_readers.items()},
        shares=dict(group.shares),
        holders=None if group.holders is None else dict(group.holders),
    )


def _max_throughput(sources: Mapping[str, Source], forks: Iterable[ForkRecord]) -> float | None:
    """The fastest that a fork of the group read from other hosts."""
    rates = [source.ingress_rate or 0.0 for source in sources.values()]
    for fork in forks:
        last = fork.finish or fork.progress
        if last is None or not last.link_bytes_per_s or SAME_HOST_TRANSPORTS.intersection(last.transports.values()):
            continue
        if isinstance(last, ForkProgress):
            from_peers = all(source_kind(name) == "peer" for name in last.sources)
        else:
            from_peers = origin_of(last) == "peers"
        if from_peers:
            rates.append(last.link_bytes_per_s)
    return max(rates, default=0.0) or None


def _storage_candidates(
    sources: Mapping[str, Source], forks: Iterable[ForkRecord], *, rate_is_set: bool
) -> tuple[Storage, ...]:
    """What instances of the group could read by themselves, or have: who comes is taken to be able to.

    `rate_is_set`: somebody says how fast storage is, so there is a snapshot where nothing is known.
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
            source_type = source_kind(name)
            if source_type != "peer":
                return (_storage_entry(source_type, name.partition(":")[2], fork.weights_id),)
    return (_storage_entry("snapshot", "", None),) if rate_is_set else ()


def _storage_entry(storage_type: str, uri: str, weights_id: str | None) -> Storage:
    if storage_type == "snapshot":
        return Storage("snapshot", uri, ORIGIN, weights_id or ORIGIN)
    return Storage("checkpoint", uri, ORIGIN) if storage_type == "checkpoint" else Storage("loader", uri)
