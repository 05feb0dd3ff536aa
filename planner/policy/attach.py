"""One target at a time: whom it reads from, given all that others read already.

For who comes late or alone, and for who lost a source. A source must be *fit* (alive, same layout and
weights, shares a transport, neither draining nor quarantined nor blamed by this fork), have a free
*slot*, and be *fed* (see `Working.fed`). What the target reads now it goes on reading while that is
good. For the rest: whoever can be read without kernels on its GPU comes first; then whoever shares the
target's host, so that a node pulls each byte over its NIC once, and there whoever can be read over a
transport of one host; then the least loaded, so that targets that come one by one form a chain; then
the nearest, the complete ones, and the relay that is furthest. Several idle seeds equally near share the
work, and so do sources that have some egress to spare each; where nobody holds all, each gives what it
has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from planner.fleet import Decision, Demand, Source, Storage
from planner.policy import reasons
from planner.policy.choosing import MOST, STRIPES, Option, choose
from planner.policy.fitness import order, unfed, unfit
from planner.policy.parts import assigned, merged
from planner.policy.ways import way
from planner.policy.weights import readable_by_itself, reading, same_weights
from planner.policy.working import Working
from rfork.image.ranges import Range, count, intersect, normalise, subtract


def attach(working: Working, demand: Demand, candidates: Iterable[Source]) -> Decision:
    """Assign what the target misses; `demand.target` names the weights that are wanted."""
    candidates = list(candidates)
    missing = subtract([(0, demand.target.chunk_count)], demand.target.verified)
    working.release(demand)
    demand, storage = _still_from_storage(demand, missing)
    target = demand.target
    rest = subtract(missing, [each for _, chunks in storage for each in chunks])
    kept = _still_from_peers(working, demand, rest)
    rest = subtract(rest, [each for _, chunks in kept for each in chunks])
    obstacles: dict[str, str] = {}
    total = count(missing)
    keeps = {source.instance_id: count(chunks) / total for source, chunks in kept}
    options, full = _options(working, demand, rest, candidates, keeps, obstacles) if rest else ([], ())
    chosen = choose(target, rest, count(rest) / total, options) if rest else []
    rest = subtract(rest, [each for _, chunks in chosen for each in chunks])
    if (beyond := subtract(rest, full)) and target.instance_id not in demand.blamed:
        if own := readable_by_itself(target, beside=True):
            storage, rest = (*storage, (own, beyond)), subtract(rest, beyond)
        elif not full and not storage and (own := readable_by_itself(target)):
            # All or nothing, where it is not known to be what the others give, or cannot be read by chunk.
            kept, chosen, storage, rest = [], [], ((own, missing),), ()
            target = reading(target, own)
    assignments = assigned(target, (*kept, *chosen))
    if assignments or storage:
        reason = reasons.how(working, target, assignments, storage)
    else:
        reason = reasons.all_refused(target, obstacles)
    again = bool(rest and (full or assignments or storage or _may_read(working, demand, candidates)))
    return Decision(
        target.weights_id, assignments, reason, draft=target.draft, storage=merged(storage), full=again
    )


def _still_from_storage(
    demand: Demand, missing: tuple[Range, ...]
) -> tuple[Demand, tuple[tuple[Storage, tuple[Range, ...]], ...]]:
    """What the target goes on reading from its own storage, and the demand for what fits that."""
    target = demand.target
    shares = [share.chunks for share in demand.current if share.source_id == target.instance_id]
    chunks = intersect([chunk for each in shares for chunk in each], missing)
    own = readable_by_itself(target, beside=True) or readable_by_itself(target)
    if not chunks or own is None or target.instance_id in demand.blamed:
        return demand, ()
    if not target.verified:
        demand = replace(demand, target=reading(target, own))
    return demand, ((own, missing if own.kind == "loader" else chunks),)


def _still_from_peers(
    working: Working, demand: Demand, rest: tuple[Range, ...]
) -> list[tuple[Source, tuple[Range, ...]]]:
    """What the target goes on reading from others: what is good and still missing."""
    target = demand.target
    kept: list[tuple[Source, tuple[Range, ...]]] = []
    for share in demand.current:
        source = working.source(share.source_id)
        if source is None or unfit(source, demand, working.now, reads=True) or not working.slots(source):
            continue
        if (source.slow and not source.complete) or source.instance_id == target.instance_id:
            continue
        if not same_weights(source, target):
            continue
        chunks = intersect(share.chunks, rest)
        # One whose own reads are not known yet (the planner restarted) is taken at the target's word, if it
        # has begun itself.
        if working.known(source) or not source.verified:
            chunks = working.fed(source, chunks, target)
        if chunks:
            kept.append((source, chunks))
            rest = subtract(rest, chunks)
    return kept


def _may_read(working: Working, demand: Demand, candidates: Iterable[Source]) -> bool:
    """Whether one of those that wait too could read the weights from its storage: it will, once it asks.

    Most have not said what they could read, as they had somebody to read from: so where the target was
    elected to, and cannot any more, those that wait for it are taken to have some.
    """
    target = demand.target
    return any(
        not source.complete
        and working.known(source)
        and same_weights(source, target)
        and not unfit(source, demand, working.now)
        and (demand.elected or readable_by_itself(replace(target, storage=source.storage), beside=True))
        for source in candidates
    )


def _options(
    working: Working,
    demand: Demand,
    rest: tuple[Range, ...],
    candidates: Iterable[Source],
    keeps: Mapping[str, float],
    obstacles: dict[str, str],
) -> tuple[list[Option], tuple[Range, ...]]:
    """Who can give some of the rest, best first, and what only those could that have no free slot now.

    `keeps`: what part of its speed the target goes on reading from a source.
    """
    target = demand.target
    options: list[Option] = []
    full: tuple[Range, ...] = ()
    left = rest
    lost = bool(demand.blamed or demand.current)
    for source in sorted(candidates, key=lambda source: order(working, source, target, lost=lost)):
        if source.instance_id == target.instance_id:
            continue
        if sum(option.gives == rest for option in options) == STRIPES or (not left and len(options) > MOST):
            break
        obstacle = unfit(source, demand, working.now)
        gives = () if obstacle else working.fed(source, rest, target)
        if not obstacle and not gives:
            obstacle = unfed(working, source, target)
        elif not obstacle and not working.slots(source):
            obstacle = (
                f"at capacity ({len(working.readers(source.instance_id))} of {source.max_readers} readers)"
            )
            full = normalise((*full, *gives))
        if obstacle:
            obstacles[source.instance_id] = obstacle
        else:
            spare = max(0.0, working.spare(source, target) - keeps.get(source.instance_id, 0.0))
            options.append(Option(source, gives, spare, way(source, target)))
            left = subtract(left, gives)
    return options, intersect(full, left)
