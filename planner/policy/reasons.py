"""The words in which a plan says how it came about, or why it has no routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from planner.fleet import Assignment, Group, Source, Storage
from planner.policy.ways import runs_kernels, takes_one_host
from rfork.image.ranges import Range, count
from rfork.weights_version import FIRST, is_unnamed, short

if TYPE_CHECKING:
    from planner.policy.working import Working

NAMED: Final = 8
"""Most instances that a reason names."""


def how(
    working: Working,
    target: Source,
    assignments: Sequence[Assignment],
    storage: Sequence[tuple[Storage, tuple[Range, ...]]],
) -> str:
    """How the sources were chosen."""
    group = working.group
    first = bool(storage) and not assignments and _is_first(group)
    parts = [nobody(group, ())] if first else []
    parts += [
        f"elected to read {_part(chunks, target)} from {each.kind}{f' {each.uri}' if each.uri else ''}"
        for each, chunks in storage
    ]
    if len(assignments) == 1:
        parts.append(_behind(working, target, assignments[0]) + _over(assignments[0]))
    elif assignments:
        named = [
            f"{_part(each.chunks, target)} from {each.source_id}{_over(each)}"
            for each in sorted(assignments, key=lambda each: each.chunks)[:NAMED]
        ]
        if len(assignments) > NAMED:
            named.append(f"and {len(assignments) - NAMED} more")
        parts.append(f"striped over {len(assignments)} sources: {', '.join(named)}")
    return "; ".join(parts)


def _behind(working: Working, target: Source, assignment: Assignment) -> str:
    source = working.source(assignment.source_id)
    readers = len(working.readers(assignment.source_id))
    others = f"{readers} other reader{'' if readers == 1 else 's'}"
    if source is None:
        return f"from {assignment.source_id} ({others})"
    if source.complete:
        return f"from seed {source.instance_id} ({others})"
    return f"behind relay {source.instance_id} ({source.watermark} of {source.chunk_count} chunks, {others})"


def _over(assignment: Assignment) -> str:
    """The transport, where it is one that makes a difference to the source."""
    if takes_one_host(assignment.transports):
        return f" over {assignment.transports[0]} on this host"
    if runs_kernels(assignment.transports):
        return f" over {assignment.transports[0]}, which runs kernels on the source's GPU"
    return ""


def _is_first(group: Group) -> bool:
    """Return whether other versions are served, and no instance has all of this one."""
    complete = any(source.complete for source in group.sources.values())
    return bool(group.other_versions) and not complete and not is_unnamed(group.version)


def _part(chunks: tuple[Range, ...], target: Source) -> str:
    return f"{count(chunks)} of {target.chunk_count} chunks"


def nobody(group: Group, others: Sequence[Source]) -> str:
    """Return why no instance holds the layout, and what the fleet holds instead."""
    named = group.version and not is_unnamed(group.version)
    version = f"version {short(group.version)} of " if named else ""
    model = f"{version}model {group.model}"
    if others:
        return other_layouts(group, others, f"{model} at rank {group.rank_key}")
    if group.other_versions and is_unnamed(group.version):
        return f"no version of model {group.model} can be taken over; {served(group.other_versions)}"
    if group.other_versions:
        return f"{FIRST} {short(group.version)} of model {group.model}; {served(group.other_versions)}"
    if group.other_ranks:
        return (
            f"no instance holds {model} at rank {group.rank_key}; "
            f"other ranks are held: {', '.join(group.other_ranks[:NAMED])}"
        )
    return f"no instance holds {model}"


def served(versions: Mapping[str, int]) -> str:
    """Return how many instances serve which versions, as ``4 instances serve files:91bc01f2``."""
    most = sorted(versions, key=lambda version: (-versions[version], version))
    parts = [
        f"{versions[version]} instance{' serves' if versions[version] == 1 else 's serve'} {short(version)}"
        for version in most[:NAMED]
    ]
    return ", ".join(parts) + (f" and {len(most) - NAMED} other versions" if len(most) > NAMED else "")


def other_layouts(group: Group, others: Sequence[Source], what: str) -> str:
    """Some hold `what`, with other tensors: whom to compare with."""
    layouts = sorted(group.other_layouts or {source.layout_id for source in others})
    number = sum(group.other_layouts.values()) or len(others)
    first = representative(others)
    holders = f"{number} instance{' holds' if number == 1 else 's hold'}"
    return (
        f"{holders} {what} with another layout ({', '.join(layouts[:NAMED])}): "
        f"layout differs from instance {first.instance_id} at {first.address}"
    )


def representative(sources: Sequence[Source]) -> Source:
    """The one to compare with, of several: a complete one where there is one."""
    return min(sources, key=lambda source: (not source.complete, source.instance_id))


def all_refused(target: Source, obstacles: Mapping[str, str]) -> str:
    """Some hold this layout, and none can be read from: what stands in the way of each."""
    named = [f"{instance_id} {why}" for instance_id, why in sorted(obstacles.items())[:NAMED]]
    if len(obstacles) > NAMED:
        named.append(f"and {len(obstacles) - NAMED} more")
    return f"no source of {len(obstacles)} can be read from: {'; '.join(named)}"
