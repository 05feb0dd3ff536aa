"""Background forks: a holder's prefetch must not delay a fork that an engine waits for.

A background fork reads over the network only if neither its target's host receives for an engine's fork nor its
source's host sends for one, and it leaves each source a free slot. Once that changes, it reads elsewhere or pauses: its
plan is empty until they have ended. Reads within a host use no network and are not limited. The forks of engines ignore
the load of background forks, as these will yield.

A background fork counts as an engine's fork while one depends on it: while an engine's fork reads chunks from its
target that the target has yet to receive, directly or through other background forks. A fork is therefore never
assigned chunks that a paused relay lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from planner.policy.transports import is_same_host_read
from planner.policy.types import ChunkShare, Source
from rfork.image.ranges import subtract


def targets_waited_for(
    targets: Iterable[str], source: Callable[[str], Source | None], shares: Callable[[str], Iterable[ChunkShare]]
) -> frozenset[str]:
    """Return the holders' images that engines' forks depend on. `targets`: those of all running forks.

    `source` returns an instance by its id, and `shares` what it reads.
    """
    found: set[str] = set()
    pending = [target for name in targets if (target := source(name)) is not None and not target.background]
    while pending:
        reader = pending.pop()
        for share in shares(reader.instance_id):
            if share.source_id in found or share.source_id == reader.instance_id:
                continue
            relay = source(share.source_id)
            if relay is None or not relay.background or relay.complete:
                continue
            if subtract(subtract(share.chunks, relay.verified), reader.verified):
                found.add(share.source_id)
                pending.append(relay)
    return frozenset(found)


def uses_busy_link(source: Source, target: Source, receiving: Container[str], sending: Container[str]) -> bool:
    """Return True if a read would share a network link with forks that engines wait for.

    `receiving` and `sending` are the hosts whose links these forks use, in each direction.
    """
    if is_same_host_read(source, target):
        return False
    return target.location.host in receiving or source.location.host in sending


def accepted_forks(source: Source) -> int:
    """Return how many forks of any host may read from a source at once.

    One slot of a holder's image is for an engine on its host, which would otherwise read over the network what the
    host receives already.
    """
    return source.max_readers - source.background


def free_slots(source: Source, readers: int, *, same_host: bool, has_own_engine: bool) -> int:
    """Return how many more forks may read from a source. `same_host`: those on its host, otherwise those on others.

    `has_own_engine`: one of its readers is an engine on its host.
    """
    slots = source.max_readers if same_host or has_own_engine else accepted_forks(source)
    return max(0, slots - readers)


def reserved_slots(source: Source, *, same_host: bool, engine_waits: bool) -> int:
    """Return how many of these slots a background fork leaves to engines.

    The only slot is reserved once an engine waits, that for an engine on the source's host always.
    """
    return int(accepted_forks(source) > 1 or engine_waits or (source.background and same_host))


def is_waiting(target: Source, shares: Iterable[ChunkShare]) -> bool:
    """Return True if an engine's target misses chunks that its plan does not assign."""
    if target.background:
        return False
    assigned = [chunk for share in shares for chunk in share.chunks]
    return bool(subtract(subtract([(0, target.chunk_count)], target.verified), assigned))
