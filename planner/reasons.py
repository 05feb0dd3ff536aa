"""The words in which a plan says how it came about, or why it has no routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from planner.fleet import Demand, Group, Source

NAMED: Final = 8
"""Most instances that a reason names."""


def how(chosen: list[Source], group: Group, demand: Demand) -> str:
    """How the sources were chosen."""
    if len(chosen) > 1:
        return f"striped over {len(chosen)} idle seeds"
    source = chosen[0]
    readers = group.other_readers(source, demand.fork_id)
    others = f"{readers} other reader{'' if readers == 1 else 's'}"
    if source.complete:
        return f"from seed {source.instance_id} ({others})"
    return f"behind relay {source.instance_id} ({source.watermark} of {source.chunk_count} chunks, {others})"


def nobody(group: Group, alive: list[Source]) -> str:
    """Nobody holds this layout: what the fleet holds instead."""
    if alive:
        return other_layouts(alive, f"model {group.model} at rank {group.rank_key}")
    if group.other_ranks:
        return (
            f"no instance holds model {group.model} at rank {group.rank_key}; "
            f"other ranks are held: {', '.join(group.other_ranks[:NAMED])}"
        )
    return f"no instance holds model {group.model}"


def other_layouts(others: list[Source], what: str) -> str:
    """Some hold `what`, with other tensors: whom to compare with."""
    layouts = sorted({source.layout_id for source in others})
    first = representative(others)
    holders = f"{len(others)} instance{' holds' if len(others) == 1 else 's hold'}"
    return (
        f"{holders} {what} with another layout ({', '.join(layouts[:NAMED])}): "
        f"layout differs from instance {first.instance_id} at {first.address}"
    )


def representative(sources: list[Source]) -> Source:
    """The one to compare with, of several: a complete one where there is one."""
    return min(sources, key=lambda source: (not source.complete, source.instance_id))


def all_refused(alive: list[Source], obstacles: Mapping[str, str]) -> str:
    """Some hold this layout, and none can be read from: what stands in the way of each."""
    named = [f"{instance_id} {why}" for instance_id, why in sorted(obstacles.items())[:NAMED]]
    if len(obstacles) > NAMED:
        named.append(f"and {len(obstacles) - NAMED} more")
    reason = f"no source of {len(obstacles)} can be read from: {'; '.join(named)}"
    others = [source for source in alive if source.instance_id not in obstacles]
    return f"{reason}; {other_layouts(others, 'this model and rank')}" if others else reason
