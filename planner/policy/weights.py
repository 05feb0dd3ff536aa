"""Weights that a target may receive, and the storage that matches them."""

from __future__ import annotations

from dataclasses import replace

from planner.policy.types import ForkDemand, Source, Storage


def weights_compatible(source: Source, target: Source) -> bool:
    """Return True if the two may have chunks of one image; an instance without chunks matches any."""
    if source.layout_id != target.layout_id or source.chunk_count != target.chunk_count:
        return False
    if source.weights_id is not None and target.weights_id is not None:
        return source.weights_id == target.weights_id
    if source.provisional_id is not None and target.provisional_id is not None:
        return source.provisional_id == target.provisional_id
    return not (source.weights_id or source.provisional_id) or not (target.weights_id or target.provisional_id)


def with_requested_weights(demand: ForkDemand, weights_id: str | None, provisional_id: str | None) -> ForkDemand:
    """Return the demand with these weights as the requested ones."""
    target = demand.target
    if target.verified and not (target.weights_id or target.provisional_id):
        demand = replace(demand, target=replace(target, verified=()))
    return with_weights(demand, weights_id, provisional_id)


def with_weights(demand: ForkDemand, weights_id: str | None, provisional_id: str | None) -> ForkDemand:
    """Return the demand of a target with these weights."""
    target = demand.target
    if (target.weights_id, target.provisional_id) == (weights_id, provisional_id):
        return demand  # nothing to copy, as in a replan
    return replace(demand, target=replace(target, weights_id=weights_id, provisional_id=provisional_id))


def with_storage_weights(target: Source, storage: Storage) -> Source:
    """Return the target with the weights of this storage."""
    provisional_id = storage.origin if storage.kind == "checkpoint" else None
    return replace(target, weights_id=storage.weights_id, provisional_id=provisional_id)


def storage_for_missing_chunks(target: Source, *, has_other_sources: bool = False) -> Storage | None:
    """Return the storage from which the target may read chunks that no source serves.

    It must match the chunks that the target has, and with `has_other_sources` those that it receives from others.
    """
    for storage in target.storage:
        if not target.verified and not has_other_sources:
            return storage
        if storage.weights_id is not None and storage.weights_id == target.weights_id:
            return storage
        if storage.kind == "checkpoint" and storage.origin is not None and storage.origin == target.provisional_id:
            return storage
    return None
