"""Human-readable reasons of a plan: how sources were chosen, or why there are no routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from planner.policy.transports import is_same_host_route, uses_gpu_kernels
from planner.policy.types import GroupView, RouteAssignment, Source, Storage
from rfork.image.ranges import Range, count
from rfork.weights_version import FIRST, is_unnamed, short

if TYPE_CHECKING:
    from planner.policy.plan_state import PlanState

MAX_NAMED: Final = 8
"""Maximum number of instances named in a reason."""


def choice_reason(
    state: PlanState,
    target: Source,
    assignments: Sequence[RouteAssignment],
    storage: Sequence[tuple[Storage, tuple[Range, ...]]],
) -> str:
    """Return how the sources were chosen."""
    group = state.group
    first = bool(storage) and not assignments and _is_first(group)
    parts = [no_holder_reason(group, ())] if first else []
    parts += [
        f"elected to read {_chunk_count_phrase(chunks, target)} from {each.kind}{f' {each.uri}' if each.uri else ''}"
        for each, chunks in storage
    ]
    if len(assignments) == 1:
        parts.append(_downstream_phrase(state, target, assignments[0]) + _transport_phrase(assignments[0]))
    elif assignments:
        source_phrases = [
            f"{_chunk_count_phrase(each.chunks, target)} from {each.source_id}{_transport_phrase(each)}"
            for each in sorted(assignments, key=lambda each: each.chunks)[:MAX_NAMED]
        ]
        if len(assignments) > MAX_NAMED:
            source_phrases.append(f"and {len(assignments) - MAX_NAMED} more")
        parts.append(f"striped over {len(assignments)} sources: {', '.join(source_phrases)}")
    return "; ".join(parts)


def _downstream_phrase(state: PlanState, target: Source, assignment: RouteAssignment) -> str:
    source = state.source(assignment.source_id)
    readers = len(state.readers(assignment.source_id))
    others = f"{readers} other reader{'' if readers == 1 else 's'}"
    if source is None:
        return f"from {assignment.source_id} ({others})"
    if source.complete:
        return f"from seed {source.instance_id} ({others})"
    return f"from relay {source.instance_id} ({source.watermark} of {source.chunk_count} chunks, {others})"


def _transport_phrase(assignment: RouteAssignment) -> str:
    """Return the transport, if it is one that affects the source."""
    if is_same_host_route(assignment.transports):
        return f" over {assignment.transports[0]} on this host"
    if uses_gpu_kernels(assignment.transports):
        return f" over {assignment.transports[0]}, which runs kernels on the source's GPU"
    return ""


def _is_first(group: GroupView) -> bool:
    """Return True if other versions are served, and no instance has all of this one."""
    complete = any(source.complete for source in group.sources.values())
    return bool(group.other_versions) and not complete and not is_unnamed(group.version)


def _chunk_count_phrase(chunks: tuple[Range, ...], target: Source) -> str:
    return f"{count(chunks)} of {target.chunk_count} chunks"


def no_holder_reason(group: GroupView, others: Sequence[Source]) -> str:
    """Return why no instance has the layout, and what the fleet holds instead."""
    has_version = group.version and not is_unnamed(group.version)
    version = f"version {short(group.version)} of " if has_version else ""
    model = f"{version}model {group.model}"
    if others:
        return other_layouts_phrase(group, others, f"{model} at rank {group.rank_key}")
    if group.other_versions and is_unnamed(group.version):
        return f"no version of model {group.model} can be adopted; {served_versions_phrase(group.other_versions)}"
    if group.other_versions:
        return f"{FIRST} {short(group.version)} of model {group.model}; {served_versions_phrase(group.other_versions)}"
    if group.other_ranks:
        return (
            f"no instance has {model} at rank {group.rank_key}; "
            f"other ranks are available: {', '.join(group.other_ranks[:MAX_NAMED])}"
        )
    return f"no instance has {model}"


def served_versions_phrase(versions: Mapping[str, int]) -> str:
    """Return how many instances serve which versions, as ``4 instances serve files:91bc01f2``."""
    by_count = sorted(versions, key=lambda version: (-versions[version], version))
    parts = [
        f"{versions[version]} instance{' serves' if versions[version] == 1 else 's serve'} {short(version)}"
        for version in by_count[:MAX_NAMED]
    ]
    return ", ".join(parts) + (f" and {len(by_count) - MAX_NAMED} other versions" if len(by_count) > MAX_NAMED else "")


def other_layouts_phrase(group: GroupView, others: Sequence[Source], what: str) -> str:
    """Return that instances have `what` with another layout, and one to compare with."""
    layouts = sorted(group.other_layouts or {source.layout_id for source in others})
    number = sum(group.other_layouts.values()) or len(others)
    first = sample_source(others)
    holders = f"{number} instance{' has' if number == 1 else 's have'}"
    return (
        f"{holders} {what} with another layout ({', '.join(layouts[:MAX_NAMED])}): "
        f"layout differs from instance {first.instance_id} at {first.address}"
    )


def sample_source(sources: Sequence[Source]) -> Source:
    """Return the instance to compare layouts with: a complete one, if any."""
    return min(sources, key=lambda source: (not source.complete, source.instance_id))


def all_ineligible_reason(target: Source, ineligible_reasons: Mapping[str, str]) -> str:
    """Return the reason of each source with this layout why it cannot be read from."""
    source_phrases = [
        f"{instance_id} {reason}" for instance_id, reason in sorted(ineligible_reasons.items())[:MAX_NAMED]
    ]
    if len(ineligible_reasons) > MAX_NAMED:
        source_phrases.append(f"and {len(ineligible_reasons) - MAX_NAMED} more")
    return f"no readable source among {len(ineligible_reasons)}: {'; '.join(source_phrases)}"
