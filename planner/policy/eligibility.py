"""Eligibility and ranking of sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from planner.policy.plan_state import PlanState
from planner.policy.transports import no_transport_reason, transport_cost
from planner.policy.types import ForkDemand, Source, distance

YIELDS: Final = "would delay engines: this fork is a prefetch"
"""Reason why a background fork may not read from a source now."""


SourceSortKey = tuple[bool, bool, bool, bool, float, int, int, bool, bool, int, str]


def source_order(
    state: PlanState, target: Source, *, excluded: bool = False, chunk: int | None = None
) -> Callable[[Source], SourceSortKey]:
    """Return the function that computes the sort key of a source; the lowest is read from first.

    A target that begins prefers the sources with the most progress. A target that lost its source only needs
    one that is ahead of it, and leaves the others to targets that need them. With `chunk`, it prefers sources that
    receive this chunk over few links.
    """
    location, target_watermark = target.location, target.watermark
    has_begun = bool(target.verified) or excluded

    def sort_key(source: Source) -> SourceSortKey:
        distance_key = distance(source.location, location)
        kernels, leaves_host = transport_cost(source, target)
        watermark = source.watermark
        load = state.load(source, target)
        return (
            source.is_slow_relay,
            kernels,
            distance_key > 0,
            leaves_host,
            round(load, 1) if load else 0.0,  # most are idle, and rounding takes longer than the rest of the key
            distance_key,
            0 if chunk is None else state.links(source, chunk),
            has_begun and watermark < target_watermark,
            not has_begun and not source.complete,
            watermark if has_begun else -watermark,
            source.instance_id,
        )

    return sort_key


def ineligible_reason(state: PlanState, source: Source, demand: ForkDemand, *, reads: bool = False) -> str:
    """Return why no fork, or not this one, may read from the source; empty if it may.

    Current readers (`reads`) may finish while the source drains.
    """
    if source.state == "draining" and not reads:
        return "draining"
    if state.now < source.quarantined_until:
        return f"quarantined: {source.quarantine}"
    if source.instance_id in demand.excluded:
        return f"failed this fork: {demand.excluded[source.instance_id]}"
    if reason := no_transport_reason(source, demand.target):
        return reason
    return YIELDS if state.must_yield(source, demand.target) else ""


def no_data_reason(state: PlanState, source: Source, target: Source) -> str:
    """Return why the source can serve none of the missing chunks, now or later."""
    if source.weights_id is not None and target.weights_id is not None and source.weights_id != target.weights_id:
        return f"has other weights ({source.weights_id})"
    progress_text = f"has {source.watermark} of {source.chunk_count} chunks"
    parents = [share.source_id for share in state.shares(source.instance_id)]
    if not parents:
        return f"{progress_text} and no source of its own"
    missing_parents = [parent for parent in parents if state.source(parent) is None]
    if missing_parents:
        return f"{progress_text} and its source {missing_parents[0]} was removed"
    return f"{progress_text} and depends on the target itself, or on a relay without a source"
