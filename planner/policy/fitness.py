"""Whether a source can be read from, why not, and which of several is best."""

from __future__ import annotations

from planner.fleet import Demand, Source, distance
from planner.policy.ways import apart, way
from planner.policy.working import Working


def order(
    working: Working, source: Source, target: Source, *, lost: bool = False
) -> tuple[bool, bool, bool, bool, float, int, bool, bool, int, str]:
    """What comes first is read from first.

    To one that begins, those that are furthest are best. One that lost its source needs no more than to be
    ahead of: so it leaves the seeds and the furthest to those that need them.
    """
    away = distance(source.place, target.place)
    begun = bool(target.verified) or lost
    kernels, leaves_host = way(source, target)
    return (
        source.slow and not source.complete,
        kernels,
        away > 0,
        leaves_host,
        round(working.load(source, target), 1),
        away,
        begun and source.watermark < target.watermark,
        not source.complete and not begun,
        source.watermark if begun else -source.watermark,
        source.instance_id,
    )


def unfit(source: Source, demand: Demand, now: float, *, reads: bool = False) -> str:
    """Why nobody, or not this fork, may read from the source; empty where it may.

    Who `reads` there already may finish while the source drains.
    """
    if source.state == "draining" and not reads:
        return "draining"
    if now < source.quarantined_until:
        return f"quarantined: {source.quarantine}"
    if source.instance_id in demand.blamed:
        return f"failed this fork: {demand.blamed[source.instance_id]}"
    return apart(source, demand.target)


def unfed(working: Working, source: Source, target: Source) -> str:
    """Why the source can give nothing of what is missing, now or later."""
    if (
        source.weights_id is not None
        and target.weights_id is not None
        and source.weights_id != target.weights_id
    ):
        return f"holds other weights ({source.weights_id})"
    held = f"has {source.watermark} of {source.chunk_count} chunks"
    parents = [share.source_id for share in working.shares(source.instance_id)]
    if not parents:
        return f"{held} and reads from nobody"
    gone = [parent for parent in parents if working.source(parent) is None]
    if gone:
        return f"{held} and its own source {gone[0]} is gone"
    return f"{held} and waits for the target itself, or for one that waits for nobody"
