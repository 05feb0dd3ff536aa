"""Invariants of every plan, checked against the definitions and not with the policy's own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from planner.policy.types import ForkDemand, GroupView, PlanDecision, Source
from rfork.image.ranges import Range, count, indices, intersect, normalise, subtract
from tests.unit.planner.builders import apply_decisions, common_transports

ContentKey = tuple[str | None, str | None]
"""weights_id and provisional_id: distinguishes the chunks of different images."""


def violations(
    fleet: GroupView, demands: Sequence[ForkDemand], decisions: Mapping[str, PlanDecision], now: float
) -> list[str]:
    """Return one line per violated invariant."""
    after = apply_decisions(fleet, demands, decisions)
    found: list[str] = []
    for demand in demands:
        found += (
            f"{demand.fork_id}: {each}" for each in _single_decision_violations(after, demands, demand, decisions, now)
        )
        found += (f"{demand.fork_id}: {each}" for each in _unreachable_chunks(fleet, after, demands, demand, decisions))
        found += (
            f"{demand.fork_id}: {each}" for each in _duplicate_storage_reads(after, demand, demands, decisions, now)
        )
    for source_id in {each.source_id for decision in decisions.values() for each in decision.assignments}:
        readers, max_readers = len(after.readers[source_id]), after.sources[source_id].max_readers
        if readers > max_readers:
            found.append(f"{source_id} has {readers} readers of {max_readers}")
    return found


def missing(demand: ForkDemand) -> tuple[Range, ...]:
    """Return the chunks that the target needs; chunks of unknown weights count as missing."""
    return subtract([(0, demand.target.chunk_count)], readable_chunks(demand.target))


def readable_chunks(source: Source) -> tuple[Range, ...]:
    """Return the chunks that a source can serve; chunks of unknown weights cannot be served."""
    return source.verified if source.weights_id or source.provisional_id else ()


def covered(decision: PlanDecision) -> tuple[Range, ...]:
    """Return the chunks that the decision assigns."""
    return normalise(chunk for chunks in _chunk_sets(decision) for chunk in chunks)


def _chunk_sets(decision: PlanDecision) -> list[tuple[Range, ...]]:
    peers = [each.chunks for each in decision.assignments]
    return peers + [chunks for _, chunks in decision.storage]


def _single_decision_violations(
    after: GroupView,
    demands: Sequence[ForkDemand],
    demand: ForkDemand,
    decisions: Mapping[str, PlanDecision],
    now: float,
) -> Iterator[str]:
    """Return the violations visible in a single decision."""
    target, decision = demand.target, decisions[demand.fork_id]
    names = _planned_content(demands, decisions)
    if count(covered(decision)) != sum(count(chunks) for chunks in _chunk_sets(decision)):
        yield "a chunk is assigned twice"
    if subtract(covered(decision), missing(demand)):
        yield "a chunk is assigned that is not missing"
    if not covered(decision) and not decision.reason:
        yield "nothing is assigned, and no reason is stated"
    if readable_chunks(target) and covered(decision) and target.weights_id not in (None, decision.weights_id):
        yield "the target has other weights"
    for each in decision.assignments:
        source = after.sources[each.source_id]
        for obstacle in _ineligibility(source, demand, now):
            yield f"reads from {each.source_id}, which {obstacle}"
        if not _is_compatible(
            names.get(each.source_id, (source.weights_id, source.provisional_id)),
            (decision.weights_id, decision.provisional_id),
        ):
            yield f"reads other weights from {each.source_id}"
        if each.transports != common_transports(source, target):
            yield f"has transports that do not work between it and {each.source_id}"
    for storage, chunks in decision.storage:
        if storage not in target.storage or target.instance_id in demand.excluded:
            yield "reads from storage that it cannot read"
        reads_all = not decision.assignments and chunks == ((0, target.chunk_count),)
        if storage.kind == "loader" and (readable_chunks(target) or not reads_all):
            yield "calls its loader for only some chunks"
        if storage.kind == "snapshot" and storage.weights_id != decision.weights_id:
            yield "reads a snapshot of other weights"
        mixed = bool(readable_chunks(target) or decision.assignments)
        if storage.kind == "checkpoint" and mixed and storage.origin != decision.provisional_id:
            yield "mixes its checkpoint with chunks of other files"


def _ineligibility(source: Source, demand: ForkDemand, now: float) -> Iterator[str]:
    target = demand.target
    before = {share.source_id for share in demand.current_shares}
    if source.instance_id == target.instance_id:
        yield "is the target itself"
    if now >= source.expires_at:
        yield "is expired"
    if source.state == "draining" and source.instance_id not in before:
        yield "drains"
    if now < source.quarantined_until:
        yield "is quarantined"
    if source.instance_id in demand.excluded:
        yield "is excluded"
    if (source.layout_id, source.chunk_count) != (target.layout_id, target.chunk_count):
        yield "has another layout"
    if not common_transports(source, target):
        yield "cannot be reached over any transport"


def _unreachable_chunks(
    fleet: GroupView,
    after: GroupView,
    demands: Sequence[ForkDemand],
    demand: ForkDemand,
    decisions: Mapping[str, PlanDecision],
) -> Iterator[str]:
    """Return chunks without a path to an instance that has them or reads them from storage, for example in a
    cycle.
    """
    targets = {each.target.instance_id for each in demands}
    believed = {
        share.source_id
        for share in demand.current_shares
        # After a restart an instance's own reads are unknown until it replans: its reader's report counts.
        if share.source_id not in targets and share.source_id not in fleet.shares
    }
    for each in decisions[demand.fork_id].assignments:
        if each.source_id in believed:
            continue
        for chunk in indices(each.chunks):
            if not _reaches_data(after, each.source_id, chunk, {demand.target.instance_id}):
                yield f"chunk {chunk} never arrives from {each.source_id}"
                break


def _reaches_data(after: GroupView, instance_id: str, chunk: int, visited: set[str]) -> bool:
    pending = [instance_id]
    while pending:
        name = pending.pop()
        source = after.sources.get(name)
        if name in visited or source is None:
            continue
        visited.add(name)
        if any(begin <= chunk < end for begin, end in readable_chunks(source)):
            return True
        for share in after.shares.get(name, ()):
            if any(begin <= chunk < end for begin, end in share.chunks):
                if share.source_id == name:
                    return True
                pending.append(share.source_id)
    return False


def _duplicate_storage_reads(
    after: GroupView,
    demand: ForkDemand,
    demands: Sequence[ForkDemand],
    decisions: Mapping[str, PlanDecision],
    now: float,
) -> Iterator[str]:
    """Return chunks newly read from storage although an accessible source already reads them there."""
    target_id, decision = demand.target.instance_id, decisions[demand.fork_id]
    kept = [chunk for share in demand.current_shares if share.source_id == target_id for chunk in share.chunks]
    if kept and any(storage.kind == "loader" for storage, _ in decision.storage):
        return  # it cannot continue with only a part
    new = subtract((chunk for _, chunks in decision.storage for chunk in chunks), kept)
    names = _planned_content(demands, decisions)
    for name, shares in after.shares.items():
        source = after.sources.get(name)
        if source is None or name == target_id or any(_ineligibility(source, demand, now)):
            continue
        if not _is_compatible(
            names.get(name, _storage_content(source)), (decision.weights_id, decision.provisional_id)
        ):
            continue
        shared = [share for share in shares if not (share.all_or_nothing and after.loader_only)]
        there = [chunk for share in shared if share.source_id == name for chunk in share.chunks]
        if intersect(new, there) and not (new == missing(demand) and _serves_only_part(after, demand, name)):
            yield f"reads from storage chunks that {name} reads there"


def _storage_content(source: Source) -> ContentKey:
    """Return the content that a storage reader gets, reported or not."""
    if source.weights_id or source.provisional_id or not source.storage:
        return source.weights_id, source.provisional_id
    first = source.storage[0]
    return first.weights_id, first.origin if first.kind == "checkpoint" else None


def _serves_only_part(after: GroupView, demand: ForkDemand, name: str) -> bool:
    """Return True if other files, which must not be mixed with the target's own, are incomplete there."""
    target_id = demand.target.instance_id
    return not all(_reaches_data(after, name, chunk, {target_id}) for chunk in indices(missing(demand)))


def _planned_content(demands: Sequence[ForkDemand], decisions: Mapping[str, PlanDecision]) -> dict[str, ContentKey]:
    """Return the planned content by target."""
    decided = {each.target.instance_id: decisions[each.fork_id] for each in demands}
    return {name: (decision.weights_id, decision.provisional_id) for name, decision in decided.items()}


def _is_compatible(left: ContentKey, right: ContentKey) -> bool:
    """Return True if chunks of these contents may belong to one image; unknown content matches any."""
    for one, other in zip(left, right, strict=True):
        if one and other:
            return one == other
    return not any(left) or not any(right)
