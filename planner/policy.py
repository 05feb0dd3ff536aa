"""Who reads which chunks from whom: a pure function over frozen values.

The service, the simulator and the tests call the same `plan`. It reads no clock, draws no lots and
keeps nothing: the same group, demand and time give the same decision.

How a source is chosen: it must be *fit* (alive, same layout and weights, shares a transport, neither
draining nor quarantined nor blamed by this fork), *free* (fewer readers than it allows) and *fed* (it
holds what the target misses, or reads it from an unbroken line of sources that ends in a complete one
and does not lead through the target). Of those the one with the fewest readers wins, so that targets
that arrive together form a chain: the tail of the chain has no reader yet. Ties go to the nearer, then
to complete seeds, then to the relay that is furthest. Several idle seeds equally near share the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from planner.fleet import Assignment, Decision, Demand, Group, Source, distance
from planner.reasons import all_refused, how, nobody, representative
from rfork.image.ranges import Range, count, subtract

STRIPES: Final = 4
"""Most idle seeds that one fork reads from at once."""


def plan(group: Group, demand: Demand, now: float) -> Decision:
    """Assign every chunk that the target misses to exactly one source, or to none with the reason why."""
    target = demand.target
    # Chunks of weights that the target cannot name cannot be told from those of other weights.
    verified = target.verified if target.weights_id else ()
    missing = subtract([(0, target.chunk_count)], verified)
    if not missing:
        return Decision(target.weights_id, (), "every chunk is verified already")
    alive = [
        source
        for source in group.sources.values()
        if source.instance_id != target.instance_id and now < source.expires_at
    ]
    alike = [source for source in alive if _same_layout(source, target)]
    if not alike:
        other = representative(alive).instance_id if alive else None
        return Decision(None, (), nobody(group, alive), other_layout=other)
    obstacles = {source.instance_id: _unfit(source, demand, now) for source in alike}
    weights_id = target.weights_id if verified else _best_weights(alike, obstacles)
    chosen: list[Source] = []
    full = False
    for source in sorted(alike, key=lambda source: _order(source, group, demand)):
        if chosen and not _joins_stripe(source, chosen, group, demand):
            continue
        obstacle = obstacles[source.instance_id] or _not_fed(source, weights_id, missing, group, demand, now)
        if not obstacle:
            obstacle = _not_free(source, group, demand)
            full = full or bool(obstacle)
        obstacles[source.instance_id] = obstacle
        if not obstacle:
            chosen.append(source)
    if not chosen:
        return Decision(weights_id, (), all_refused(alive, obstacles), full=full)
    shares = _split(missing, len(chosen))
    assignments = tuple(
        Assignment(source.instance_id, share, _shared_transports(source, target))
        for source, share in zip(chosen, shares, strict=False)
    )
    return Decision(weights_id, assignments, how(chosen[: len(shares)], group, demand))


def _same_layout(source: Source, target: Source) -> bool:
    return source.layout_id == target.layout_id and source.chunk_count == target.chunk_count


def _order(source: Source, group: Group, demand: Demand) -> tuple[bool, int, int, bool, int, str]:
    reads_now = demand.fork_id in group.readers.get(source.instance_id, frozenset())
    return (
        not reads_now,  # a plan asked for again stays as it is while it can
        group.other_readers(source, demand.fork_id),
        distance(source.place, demand.target.place),
        not source.complete,
        -source.watermark,
        source.instance_id,
    )


def _joins_stripe(source: Source, chosen: list[Source], group: Group, demand: Demand) -> bool:
    """Whether the source may share the work with those chosen: all idle seeds, all equally near."""
    first, place = chosen[0], demand.target.place
    return (
        len(chosen) < STRIPES
        and all(seed.complete and group.other_readers(seed, demand.fork_id) == 0 for seed in (first, source))
        and distance(source.place, place) == distance(first.place, place)
    )


def _unfit(source: Source, demand: Demand, now: float) -> str:
    """Why nobody, or not this fork, may start to read from the source; empty where it may."""
    if source.state == "draining":
        return "draining"
    if now < source.quarantined_until:
        return f"quarantined: {source.quarantine}"
    if source.instance_id in demand.blamed:
        return f"failed this fork: {demand.blamed[source.instance_id]}"
    if not _shared_transports(source, demand.target):
        return f"offers only {', '.join(source.transports) or 'no transport'}"
    return ""


def _not_free(source: Source, group: Group, demand: Demand) -> str:
    readers = group.other_readers(source, demand.fork_id)
    return f"at capacity ({readers} of {source.max_readers} readers)" if readers >= source.max_readers else ""


def _not_fed(
    source: Source,
    weights_id: str | None,
    missing: tuple[Range, ...],
    group: Group,
    demand: Demand,
    now: float,
) -> str:
    """Why the source cannot give all that is missing, now or once it has read it itself.

    Walks from the source up to those it reads from, as far as those that wait for nobody.
    """
    seen: set[str] = set()
    fed = False
    line = [source.instance_id]
    while line:
        instance_id = line.pop()
        if instance_id in seen:
            continue
        seen.add(instance_id)
        if instance_id == demand.target.instance_id:
            return "reads from the target itself"
        whose = "" if instance_id == source.instance_id else f"its own source {instance_id} "
        link = group.sources.get(instance_id)
        if link is None or now >= link.expires_at:
            return f"{whose}is gone"
        if link.weights_id not in (None, weights_id):
            return f"{whose}holds other weights ({link.weights_id})"
        if link.weights_id is not None and not subtract(missing, link.verified):
            fed = True
            continue
        parents = group.parents.get(instance_id, ())
        if not parents:
            return f"{whose}has {link.watermark} of {link.chunk_count} chunks and reads from nobody"
        line.extend(parents)
    return "" if fed else "reads in a circle"


def _best_weights(alike: Iterable[Source], obstacles: Mapping[str, str]) -> str | None:
    """The weights that most fit seeds hold; then most seeds, most instances, the newest generation."""
    votes: dict[str, tuple[int, int, int, int]] = {}
    for source in alike:
        if source.weights_id is None:
            continue
        fit, seeds, instances, newest = votes.get(source.weights_id, (0, 0, 0, 0))
        votes[source.weights_id] = (
            fit + (source.complete and not obstacles[source.instance_id]),
            seeds + source.complete,
            instances + 1,
            max(newest, source.generation),
        )
    return max(votes, key=lambda weights_id: (votes[weights_id], weights_id), default=None)


def _shared_transports(source: Source, target: Source) -> tuple[str, ...]:
    return tuple(name for name in target.transports if name in source.transports)


def _split(missing: tuple[Range, ...], parts: int) -> list[tuple[Range, ...]]:
    """Cut into at most `parts` runs of chunks in order, whose sizes differ by one at most; none is empty."""
    total = count(missing)
    parts = min(parts, total)
    shares: list[tuple[Range, ...]] = []
    rest = list(missing)
    for part in range(parts):
        wanted = total * (part + 1) // parts - total * part // parts
        share: list[Range] = []
        while wanted:
            begin, end = rest.pop(0)
            cut = min(end, begin + wanted)
            share.append((begin, cut))
            wanted -= cut - begin
            if cut < end:
                rest.insert(0, (cut, end))
        shares.append(tuple(share))
    return shares
