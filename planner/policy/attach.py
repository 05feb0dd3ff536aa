"""Plans one target at a time, given the reads of all others.

Used for late or single targets, and for targets that lost a source. A source must be *eligible* (alive, same
layout and weights, a shared transport, neither draining nor quarantined nor excluded by this fork), have a
free *slot*, and have the chunks *available* (see `PlanState.available_chunks`). Current reads are kept while
they are good. For the rest, sources are preferred in this order: no kernels on the source's GPU; on the
target's host, so that a node receives each byte over its NIC once, and there over a same-host transport;
least loaded, so that targets that arrive one by one form a chain; nearest; complete; most progress. Several
idle seeds at the same distance share the work, and so do sources with spare egress; if no source has
everything, each serves what it has. A target that lost a source prefers those near the seed, because other targets
wait for it, and replaces each lost source separately.

Two targets leave good sources: one that is found to be slow moves below other slow ones, so that its readers can
take its position (`_source_for_slow_target`), and one that its sources delay moves to a seed that became
idle (`_move_to_idle_seed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from planner.policy import reasons
from planner.policy.chunk_split import merge_storage_reads, to_assignments
from planner.policy.eligibility import YIELDS, ineligible_reason, no_data_reason, source_order
from planner.policy.plan_state import IDLE_LOAD, PlanState
from planner.policy.source_selection import MAX_CANDIDATES, MAX_STRIPES, SourceOption, split_among
from planner.policy.starvation import is_delayed, is_worth_replan
from planner.policy.transports import is_same_host_read, transport_cost
from planner.policy.types import SLOW_FRACTION, ForkDemand, PlanDecision, Source, Storage
from planner.policy.weights import storage_for_missing_chunks, weights_compatible, with_storage_weights
from rfork.image.ranges import Range, count, intersect, normalise, subtract


def attach(state: PlanState, demand: ForkDemand, candidates: Iterable[Source]) -> PlanDecision:
    """Assign the chunks that the target is missing; `demand.target` names the requested weights."""
    candidates = list(candidates)
    missing = subtract([(0, demand.target.chunk_count)], demand.target.verified)
    state.release(demand)
    demand, storage = _keep_from_storage(demand, missing)
    target = demand.target
    unassigned = subtract(missing, [each for _, chunks in storage for each in chunks])
    kept = _keep_from_peers(state, demand, unassigned)
    if (yielded_to := _source_for_slow_target(state, demand, unassigned, candidates)) is not None:
        kept = [(yielded_to, unassigned)]
    kept = _move_to_idle_seed(state, demand, kept, candidates)
    kept += _held_on_host(state, demand, kept, unassigned, candidates)
    if kept:
        unassigned = subtract(unassigned, [each for _, chunks in kept for each in chunks])
    ineligible_reasons: dict[str, str] = {}
    total = count(missing)
    kept_ids = {source.instance_id: count(chunks) / total for source, chunks in kept}
    chosen: list[tuple[Source, tuple[Range, ...]]] = []
    no_free_slot: tuple[Range, ...] = ()
    for lost in _lost_parts(demand, unassigned):
        options, occupied = _source_options(state, demand, lost, candidates, kept_ids, ineligible_reasons)
        parts = split_among(target, lost, count(lost) / total, options)
        for source, chunks in parts:
            kept_ids[source.instance_id] = kept_ids.get(source.instance_id, 0.0) + count(chunks) / total
        chosen += parts
        no_free_slot = normalise((*no_free_slot, *occupied))
    unassigned = subtract(unassigned, [each for _, chunks in chosen for each in chunks])
    uncovered = subtract(unassigned, no_free_slot)
    leaves_storage = bool(uncovered) and state.leaves_storage(target)
    if uncovered and not leaves_storage and target.instance_id not in demand.excluded:
        if own := storage_for_missing_chunks(target, has_other_sources=True):
            storage, unassigned = (*storage, (own, uncovered)), subtract(unassigned, uncovered)
        elif not no_free_slot and not storage and (own := storage_for_missing_chunks(target)):
            # All or nothing, if the storage may differ from what the others serve, or cannot be read by
            # chunk.
            kept, chosen, storage, unassigned = [], [], ((own, missing),), ()
            target = with_storage_weights(target, own)
    assignments = to_assignments(target, (*kept, *chosen))
    if assignments or storage:
        reason = reasons.choice_reason(state, target, assignments, storage)
    else:
        reason = reasons.all_ineligible_reason(target, ineligible_reasons)
    may_gain_routes = bool(
        unassigned and (no_free_slot or assignments or storage or _peer_could_read_storage(state, demand, candidates))
    )
    yields = state.plans_background and bool(
        unassigned and (no_free_slot or leaves_storage or YIELDS in ineligible_reasons.values())
    )
    return PlanDecision(
        target.weights_id,
        assignments,
        reason,
        provisional_id=target.provisional_id,
        storage=merge_storage_reads(storage),
        no_free_slot=may_gain_routes or yields,
        is_paused=yields and not (assignments or storage),
    )


def _lost_parts(demand: ForkDemand, unassigned: tuple[Range, ...]) -> list[tuple[Range, ...]]:
    """Divide the chunks that need a source by the source that the target read them from, and the others.

    Each part is replaced separately: chunks of two sources in one queue would delay those that others wait for.
    """
    parts: list[tuple[Range, ...]] = []
    for share in demand.current_shares:
        if part := intersect(share.chunks, unassigned):
            parts.append(part)
            unassigned = subtract(unassigned, part)
    return [*parts, unassigned] if unassigned else parts


def _keep_from_storage(
    demand: ForkDemand, missing: tuple[Range, ...]
) -> tuple[ForkDemand, tuple[tuple[Storage, tuple[Range, ...]], ...]]:
    """Return the current reads of the target's own storage, and the demand for weights that match it."""
    target = demand.target
    shares = [share.chunks for share in demand.current_shares if share.source_id == target.instance_id]
    if not shares:
        return demand, ()
    chunks = intersect([chunk for each in shares for chunk in each], missing)
    own = storage_for_missing_chunks(target, has_other_sources=True) or storage_for_missing_chunks(target)
    if not chunks or own is None or target.instance_id in demand.excluded:
        return demand, ()
    if not target.verified:
        demand = replace(demand, target=with_storage_weights(target, own))
    return demand, ((own, missing if own.kind == "loader" else chunks),)


def _keep_from_peers(
    state: PlanState, demand: ForkDemand, unassigned: tuple[Range, ...]
) -> list[tuple[Source, tuple[Range, ...]]]:
    """Return the current reads from peers that are still good and still missing."""
    target = demand.target
    kept: list[tuple[Source, tuple[Range, ...]]] = []
    for share in demand.current_shares:
        source = state.source(share.source_id)
        if (
            source is None
            or ineligible_reason(state, source, demand, reads=True)
            or not state.free_slots(source, target)
        ):
            continue
        if (source.is_slow_relay and not target.slow) or source.instance_id == target.instance_id:
            continue
        if not weights_compatible(source, target):
            continue
        chunks = intersect(share.chunks, unassigned)
        # If the source's own reads are unknown (the planner restarted), trust the target's report, provided
        # that the source has begun.
        if state.is_known(source) or not source.verified:
            chunks = state.available_chunks(source, chunks, target)
        if chunks:
            kept.append((source, chunks))
            unassigned = subtract(unassigned, chunks)
    return kept


def _held_on_host(
    state: PlanState,
    demand: ForkDemand,
    kept: Iterable[tuple[Source, tuple[Range, ...]]],
    unassigned: tuple[Range, ...],
    candidates: Iterable[Source],
) -> list[tuple[Source, tuple[Range, ...]]]:
    """Return chunks to read from a holder on the target's host that has them but will not receive all others.

    It has paused, so the other chunks come from elsewhere.
    """
    target = demand.target
    if state.plans_background or target.location.host not in state.group.shared_hosts:
        return []  # nearly always
    holders = [each for each in candidates if each.background and not each.complete and is_same_host_read(each, target)]
    if holders:
        unassigned = subtract(unassigned, [chunk for _, chunks in kept for chunk in chunks])
    for source in holders:
        available = state.available_chunks(source, unassigned, target)
        held = intersect(available, source.verified)
        if (
            held
            and available != unassigned
            and state.free_slots(source, target)
            and not ineligible_reason(state, source, demand)
        ):
            return [(source, held)]
    return []


def _move_to_idle_seed(
    state: PlanState, demand: ForkDemand, kept: list[tuple[Source, tuple[Range, ...]]], candidates: Iterable[Source]
) -> list[tuple[Source, tuple[Range, ...]]]:
    """Let a delayed target read from a seed without readers what it would read from relays or busy seeds."""
    target = demand.target
    if target.read_rate is None:
        return kept
    delayed = [each for each in kept if not each[0].complete or state.readers(each[0].instance_id)]
    chunks = normalise(chunk for _, part in delayed for chunk in part)
    idle = [
        source
        for source in candidates
        if source.complete
        and is_delayed(target, source)
        and is_worth_replan(chunks, target, source)
        and weights_compatible(source, target)
        and state.load(source, target) <= IDLE_LOAD
        and state.free_slots(source, target)
        and not ineligible_reason(state, source, demand)
    ]
    if not idle:
        return kept
    seed = min(idle, key=source_order(state, target))
    return [*(each for each in kept if each not in delayed), (seed, chunks)]


def _source_for_slow_target(
    state: PlanState, demand: ForkDemand, unassigned: tuple[Range, ...], candidates: Iterable[Source]
) -> Source | None:
    """Return the source to which a slow target moves, so that its sources can serve the targets that read from it.

    Preferably another slow target with few readers, otherwise a source with spare egress, but the one with the least
    progress, because few wait for it. None if it has moved before, or no such source exists.
    """
    target = demand.target
    if not unassigned or not leaves_busy_source(state, demand):
        return None
    current_ids = {share.source_id for share in demand.current_shares}
    found = [
        source
        for source in candidates
        if source.instance_id not in current_ids
        and source.instance_id != target.instance_id
        and (source.is_slow_relay or state.spare_egress(source, target) >= SLOW_FRACTION)
        and state.free_slots(source, target)
        and not ineligible_reason(state, source, demand)
        and state.available_chunks(source, unassigned, target) == unassigned
    ]

    def key(source: Source) -> tuple[bool, int, int, str]:
        is_slow = source.is_slow_relay
        progress = -source.watermark if is_slow else source.watermark
        return not is_slow, len(state.readers(source.instance_id)), progress, source.instance_id

    return min(found, key=key, default=None)


def leaves_busy_source(state: PlanState, demand: ForkDemand) -> bool:
    """Return True for a slow target that reads from sources that others need, so that it moves elsewhere."""
    if not demand.target.slow or not demand.current_shares:
        return False
    current = [state.source(share.source_id) for share in demand.current_shares]
    return any(
        source is not None
        and not source.is_slow_relay
        and not (source.complete and state.readers(source.instance_id).keys() <= {demand.fork_id})
        for source in current
    )


def _peer_could_read_storage(state: PlanState, demand: ForkDemand, candidates: Iterable[Source]) -> bool:
    """Return True if another waiting target could read the weights from its storage: it will, once it
    replans.

    Most have not reported their storage, because they had a source: so if this target was elected to read
    storage and no longer can, those that wait for it are assumed to have some.
    """
    target = demand.target
    return any(
        not source.complete
        and state.is_known(source)
        and weights_compatible(source, target)
        and not ineligible_reason(state, source, demand)
        and (
            demand.is_elected_reader
            or storage_for_missing_chunks(replace(target, storage=source.storage), has_other_sources=True)
        )
        for source in candidates
    )


def _source_options(
    state: PlanState,
    demand: ForkDemand,
    unassigned: tuple[Range, ...],
    candidates: Iterable[Source],
    kept_ids: Mapping[str, float],
    ineligible_reasons: dict[str, str],
) -> tuple[list[SourceOption], tuple[Range, ...]]:
    """Return sources for the rest, best first, and the chunks that only sources without a free slot have.

    `kept_ids`: by source, the fraction of the target's speed that it keeps reading there.
    """
    target = demand.target
    options: list[SourceOption] = []
    no_free_slot: tuple[Range, ...] = ()
    left = unassigned
    excluded = bool(demand.excluded or demand.current_shares)
    with_spare = examined = 0
    chunk = unassigned[-1][1] - 1 if demand.current_shares else None
    for source in sorted(candidates, key=source_order(state, target, excluded=excluded, chunk=chunk)):
        if source.instance_id == target.instance_id:
            continue
        if with_spare == MAX_STRIPES or (not left and examined >= MAX_CANDIDATES):
            break
        examined += 1
        exclusion_reason = ineligible_reason(state, source, demand)
        available = () if exclusion_reason else state.available_chunks(source, unassigned, target)
        if not exclusion_reason and not available:
            exclusion_reason = no_data_reason(state, source, target)
        elif not exclusion_reason and not state.free_slots(source, target):
            exclusion_reason = f"at capacity ({len(state.readers(source.instance_id))} of {source.max_readers} readers)"
            no_free_slot = normalise((*no_free_slot, *available))
        if exclusion_reason:
            ineligible_reasons[source.instance_id] = exclusion_reason
        else:
            spare_egress = max(0.0, state.spare_egress(source, target) - kept_ids.get(source.instance_id, 0.0))
            options.append(SourceOption(source, available, spare_egress, transport_cost(source, target)))
            with_spare += available == unassigned and spare_egress > IDLE_LOAD
            left = subtract(left, available)
    return options, intersect(no_free_slot, left)
