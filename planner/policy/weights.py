"""Which weights a target may take, and what it may read them from by itself."""

from __future__ import annotations

from dataclasses import replace

from planner.fleet import Demand, Source, Storage
from rfork.image.ranges import normalise


def same_weights(source: Source, target: Source) -> bool:
    """Whether the two may hold chunks of one image; one that holds none yet may."""
    if source.layout_id != target.layout_id or source.chunk_count != target.chunk_count:
        return False
    if source.weights_id is not None and target.weights_id is not None:
        return source.weights_id == target.weights_id
    if source.draft is not None and target.draft is not None:
        return source.draft == target.draft
    return not (source.weights_id or source.draft) or not (target.weights_id or target.draft)


def wanting(demand: Demand, weights_id: str | None, draft: str | None) -> Demand:
    """The demand, its target saying which weights are wanted."""
    verified = demand.target.verified if (demand.target.weights_id or demand.target.draft) else ()
    target = replace(demand.target, weights_id=weights_id, draft=draft, verified=normalise(verified))
    return replace(demand, target=target)


def reading(target: Source, storage: Storage) -> Source:
    """The target, by the name of what this storage holds."""
    draft = storage.origin if storage.kind == "checkpoint" else None
    return replace(target, weights_id=storage.weights_id, draft=draft)


def readable_by_itself(target: Source, *, beside: bool = False) -> Storage | None:
    """What the target may read the chunks from that nobody can give it, so that they fit those it holds,
    and those that it gets `beside` them from others.
    """
    for storage in target.storage:
        if not target.verified and not beside:
            return storage
        if storage.weights_id is not None and storage.weights_id == target.weights_id:
            return storage
        if storage.kind == "checkpoint" and storage.origin is not None and storage.origin == target.draft:
            return storage
    return None
