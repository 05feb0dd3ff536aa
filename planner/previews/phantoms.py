"""What a preview goes by: what is known of one rank of a model, and replicas that do not exist."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from planner.durations import origin_of
from planner.fleet import Demand, Group, Place, Source, Storage
from planner.groups import LiveGroup
from planner.state import State
from planner.store.records import ForkRecord
from rfork.fields import ONE_HOST
from rfork.wire import ForkProgress, PreviewRequest, source_kind

LINK: Final = 1.25e9
"""Bytes a second of a host's link where nobody knows it: 10 Gbit/s."""
STORAGE: Final = 1e9
ORIGIN: Final = "0" * 32
"""Stands for the files of a checkpoint, and for the weights of a snapshot that nobody has read to its end."""


@dataclass(frozen=True)
class Snapshot:
    """One rank of a model at one moment, by values that nothing changes any more: a thread may read them."""

    request: PreviewRequest
    now: float
    group: Group
    """As the policy sees it for these replicas; empty where the request is for a cold start."""
    sources: Mapping[str, Source]
    """All members."""
    forks: Sequence[ForkRecord]
    """Of this rank and of others."""
    like: Source
    """The member that the replicas are taken to be like."""
    image_bytes: int
    storage_s: float | None
    """How long storage takes, where that is known."""


@dataclass(frozen=True)
class Known:
    """What a preview goes by."""

    group: Group
    demands: tuple[Demand, ...]
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


def snapshot(state: State, live: LiveGroup, request: PreviewRequest, now: float) -> Snapshot | None:
    """Taken on the event loop, which it holds for a few copies.

    None where nobody tells how large the image is.
    """
    like = _like(live)
    record = None if like is None else state.instance(like.instance_id)
    if like is None or record is None:
        return None
    if request.cold:
        group = Group(live.model, live.rank_key, {}, version=live.version)
    else:
        # The first stands for all: but for their hosts, where nobody is, they are alike.
        first, others = _demand(like, request, 0), state.other_ranks(live.key)
        group = _still(live.view((first,), others, together=request.targets))
    return Snapshot(
        request,
        now,
        group,
        dict(live.sources),
        state.forks(),
        like,
        record.report.image_bytes,
        live.past.durations.storage_s,
    )


def known(taken: Snapshot) -> Known:
    """What a preview goes by, for all that were asked about."""
    request, group, like = taken.request, taken.group, taken.like
    forks = [fork for fork in taken.forks if fork.group == (group.model, group.version, group.rank_key)]
    fastest = _fastest(taken.sources, forks)
    storage_rate = taken.image_bytes / taken.storage_s if taken.storage_s else STORAGE
    return Known(
        group,
        tuple(_demand(like, request, number) for number in range(request.targets)),
        _storage(taken.sources, forks, given=request.storage_bytes_per_s is not None),
        taken.image_bytes,
        0 if request.cold else sum(_gives(each, like, taken.now) for each in taken.sources.values()),
        request.link_bytes_per_s or fastest or LINK,
        request.link_bytes_per_s is None and fastest is not None,
        request.storage_bytes_per_s or storage_rate,
        taken.now,
    )


def _like(live: LiveGroup) -> Source | None:
    """Whom the replicas are like: a member of the layout that most seeds have, then most members."""
    layouts: dict[str, list[Source]] = {}
    for source in live.sources.values():
        layouts.setdefault(source.layout_id, []).append(source)
    most = max(
        layouts.values(), key=lambda each: (sum(source.complete for source in each), len(each)), default=[]
    )
    return max(most, key=lambda source: (source.complete, source.instance_id), default=None)


def _gives(source: Source, like: Source, now: float) -> bool:
    alike = (source.layout_id, source.chunk_count) == (like.layout_id, like.chunk_count)
    return alike and source.complete and source.state != "draining" and now >= source.quarantined_until


def _demand(like: Source, request: PreviewRequest, number: int) -> Demand:
    """Of one of the replicas, the first being 0."""
    digits = len(str(request.targets))
    name = f"preview-{number + 1:0{digits}}"
    host = f"preview-host-{number // request.per_host + 1:0{digits}}"
    target = replace(
        like,
        instance_id=name,
        address="",
        weights_id=None,
        generation=0,
        state="loading",
        verified=(),
        place=Place(host, request.rack, request.zone),
        expires_at=math.inf,
        draft=None,
        storage=(),
        ingress_rate=None,
        slow=False,
        quarantined_until=0.0,
        quarantine="",
    )
    return Demand(name, target)


def _still(group: Group) -> Group:
    """The group as it is now: what the planner changes, it changes elsewhere."""
    return replace(
        group,
        sources=dict(group.sources),
        readers={name: dict(readers) for name, readers in group.readers.items() if readers},
        local={name: frozenset(forks) for name, forks in group.local.items()},
        shares=dict(group.shares),
        holders=None if group.holders is None else dict(group.holders),
    )


def _fastest(sources: Mapping[str, Source], forks: Iterable[ForkRecord]) -> float | None:
    """The fastest that a fork of the group read from other hosts."""
    rates = [source.ingress_rate or 0.0 for source in sources.values()]
    for fork in forks:
        last = fork.finish or fork.progress
        if last is None or not last.link_bytes_per_s or ONE_HOST.intersection(last.transports.values()):
            continue
        if isinstance(last, ForkProgress):
            from_peers = all(source_kind(name) == "peer" for name in last.sources)
        else:
            from_peers = origin_of(last) == "peers"
        if from_peers:
            rates.append(last.link_bytes_per_s)
    return max(rates, default=0.0) or None


def _storage(
    sources: Mapping[str, Source], forks: Iterable[ForkRecord], *, given: bool
) -> tuple[Storage, ...]:
    """What instances of the group could read by themselves, or have: who comes is taken to be able to.

    `given`: somebody says how fast storage is, so there is a snapshot where nothing is known.
    """
    for source in sources.values():
        if source.storage:
            return source.storage
    for fork in sorted(forks, key=lambda each: each.asked_at, reverse=True):
        for read in fork.storage:
            return (_stored(read.kind, read.uri, fork.weights_id),)
        last = fork.finish or fork.progress
        told: Mapping[str, int] = last.sources if last is not None else {}
        for name in told:
            kind = source_kind(name)
            if kind != "peer":
                return (_stored(kind, name.partition(":")[2], fork.weights_id),)
    return (_stored("snapshot", "", None),) if given else ()


def _stored(kind: str, uri: str, weights_id: str | None) -> Storage:
    if kind == "snapshot":
        return Storage("snapshot", uri, ORIGIN, weights_id or ORIGIN)
    return Storage("checkpoint", uri, ORIGIN) if kind == "checkpoint" else Storage("loader", uri)
