"""Which weights a target may take, and what it may read them from by itself."""

from __future__ import annotations

from dataclasses import replace

from planner.policy_types import ForkDemand, Source, Storage
from rfork.image.ranges import normalise


def weights_compatible(source: Source, target: Source) -> bool:
    """Whether the two may hold chunks of one image; one that holds none yet may."""
    if source.layout_id != target.layout_id or source.chunk_count != target.chunk_count:
        return False
    if source.weights_id is not None and target.weights_id is not None:
        return source.weights_id == target.weights_id
    if source.provisional_id is not None and target.provisional_id is not None:
        return source.provisional_id == target.provisional_id
    return not (source.weights_id or source.provisional_id) or not (target.weights_id or target.provisional_id)


def with_wanted_weights(demand: ForkDemand, weights_id: str | None, provisional_id: str | None) -> ForkDemand:
    """The demand, its target saying which weights are wanted."""
    verified = demand.target.verified if (demand.target.weights_id or demand.target.provisional_id) else ()
    target = replace(demand.target, weights_id=weights_id, provisional_id=provisional_id, verified=normalise(verified))
    return replace(demand, target=target)


def with_storage_weights(target: Source, storage: Storage) -> Source:
    """The target, by the name of what this storage holds."""
    provisional_id = storage.origin if storage.kind == "checkpoint" else None
    return replace(target, weights_id=storage.weights_id, provisional_id=provisional_id)


def own_storage_chunks(target: Source, *, has_other_sources: bool = False) -> Storage | None:
    """What the target may read the chunks from that nobody can give it, so that they fit those it holds,
    and those that it gets `has_other_sources` them from others.
    """
    for storage in target.storage:
        if not target.verified and not has_other_sources:
            return storage
        if storage.weights_id is not None and storage.weights_id == target.weights_id:
            return storage
        if storage.kind == "checkpoint" and storage.origin is not None and storage.origin == target.provisional_id:
            return storage
    return None
