"""Preview of a fork across layouts: which layouts serve boxes of the checkpoint, and what each would send.

The target's placement map is that of a running instance of the wanted rank. Without one, the complete checkpoint is
divided: every map lists all of its tensors.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import ConsoleRenderable, Group
from rich.text import Text

from rfork.cli import formatters
from rfork.cli.console import Cell, Column, FittedTable
from rfork.errors import UserError
from rfork.placement.boxes import Box, coverage, divide, wanted_boxes
from rfork.placement.placement_map import PlacementMap, TensorTable
from rfork.planner_client.client import PlannerClient
from rfork.receiver.box_assignment import by_coverage
from rfork.receiver.box_fork import BoxFork, OtherLayout
from rfork.schema import InstanceReport, Rank
from rfork.settings import InstanceSettings

QUERY_TIMEOUT_S: Final = 60.0
"""Maximum time to read the placement maps of all layouts."""
MAX_MISSING_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class LayoutShare:
    """Part of the needed bytes that one rank of a layout has, and would send."""

    rank_key: str
    layout_id: str
    host: str
    covered_bytes: int
    """Needed bytes that it has."""
    sent_bytes: int
    """Those that it would send: each byte comes from one layout."""
    boxes: int
    reason: str = ""
    """Reason for which it cannot serve other layouts; empty if it can."""


@dataclass(frozen=True, slots=True)
class LayoutsPreview:
    """Division of what a target needs among other layouts."""

    model: str
    version: str
    rank_key: str | None
    """Rank whose map is that of a running instance; None: the complete checkpoint is divided."""
    needed_bytes: int
    layouts: tuple[LayoutShare, ...]
    missing_bytes: int
    missing: tuple[str, ...]
    """Reasons for the first missing boxes."""


def preview_layouts(
    model: str, version: str, rank_key: str | None, layouts: Sequence[OtherLayout], checkpoint: TensorTable
) -> LayoutsPreview:
    """Return the division for a rank, if one of the layouts is of that rank; else that of the complete checkpoint.

    The layout of that rank is no source: a fork across layouts happens only if no instance serves it.
    """
    target = next((each for each in layouts if each.sample.rank.key == rank_key), None)
    sources = [each for each in layouts if each is not target]
    wanted = wanted_boxes(target.placement_map) if target is not None else complete_boxes(checkpoint)
    maps: list[PlacementMap] = [each.placement_map for each in sources]
    order = by_coverage(wanted, maps)
    covered, division = coverage(wanted, maps), divide(wanted, [maps[each] for each in order])
    shares = tuple(
        LayoutShare(
            sources[each].sample.rank.key,
            sources[each].sample.layout_id,
            sources[each].sample.placement.host,
            covered[each],
            sum(box.byte_count for box in part),
            len(part),
        )
        for each, part in zip(order, division.parts, strict=True)
    )
    return LayoutsPreview(
        model,
        version,
        rank_key if target is not None else None,
        sum(box.byte_count for box in wanted),
        shares,
        sum(box.byte_count for box, _ in division.missing),
        tuple(reason for _, reason in division.missing[:MAX_MISSING_LISTED]),
    )


def complete_boxes(checkpoint: TensorTable) -> list[Box]:
    """Return all tensors of a checkpoint as boxes."""
    found = []
    for index, name in enumerate(checkpoint.names):
        dtype, itemsize, shape, _ = checkpoint.type_of(index)
        found.append(Box(name, dtype, itemsize, shape, (0,) * len(shape), shape))
    return [box for box in found if box.byte_count]


def query_preview(
    client: PlannerClient, model: str, version: str | None, rank_key: str | None, settings: InstanceSettings
) -> LayoutsPreview:
    """Read the placement maps of one instance of each rank and layout, and return the preview.

    Raises UserError, NoSource, LayoutMismatch, and the errors of the planner's client.
    """
    chosen = version or _main_version(client, model)
    fork = BoxFork(model, Rank(), chosen, settings, deadline=time.monotonic() + QUERY_TIMEOUT_S)
    preview = preview_layouts(model, chosen, rank_key, fork.layouts, fork.checkpoint)
    refused = tuple(_refused(sample, reason) for sample, reason in fork.refusals)
    return replace(preview, layouts=(*preview.layouts, *refused))


def _refused(sample: InstanceReport, reason: str) -> LayoutShare:
    return LayoutShare(sample.rank.key, sample.layout_id, sample.placement.host, 0, 0, 0, reason)


def _main_version(client: PlannerClient, model: str) -> str:
    served: Counter[str] = Counter()
    for row in client.models():
        if row.model == model and row.version:
            served[row.version] += row.seeds
    if not served:
        raise UserError(f"no instance serves {model}", hint="`rfork status` lists known models, versions and ranks")
    return min(served, key=lambda version: (-served[version], version))


def render_layouts(preview: LayoutsPreview, requested_rank: str | None = None) -> ConsoleRenderable:
    """Return a table of the layouts, followed by what is missing. `requested_rank`: the requested rank key."""
    needed = formatters.size(preview.needed_bytes)
    what = (
        f"rank {formatters.rank(preview.rank_key)} needs {needed} of the checkpoint"
        if preview.rank_key is not None
        else f"complete checkpoint of {needed}"
    )
    title = f"{preview.model} {formatters.version(preview.version)}"
    columns = (
        Column("layout", min_width=12),
        Column("host", min_width=8, priority=2),
        Column("has", right=True),
        Column("would send", right=True),
        Column("boxes", right=True, priority=1),
        Column("", min_width=12),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            formatters.layout(each.rank_key, each.layout_id),
            each.host,
            "" if each.reason else f"{each.covered_bytes / max(1, preview.needed_bytes):.0%}",
            "" if each.reason else formatters.size(each.sent_bytes),
            "" if each.reason else f"{each.boxes:,}",
            Text(f"cannot: {each.reason}", "yellow") if each.reason else "",
        )
        for each in preview.layouts
    ]
    parts: list[ConsoleRenderable] = [Text.assemble((title, "bold"), f": {what}, from other layouts")]
    parts.append(FittedTable(columns, rows))
    if preview.missing_bytes:
        parts.append(Text(f"missing: {formatters.size(preview.missing_bytes)}, which no layout has", "yellow"))
        parts += [Text(f"  {reason}") for reason in preview.missing]
    else:
        parts.append(Text("nothing is missing"))
    if preview.rank_key is None:
        if requested_rank is not None:
            parts.append(Text(f"no instance of rank {formatters.rank(requested_rank)} has a placement map", "dim"))
        parts.append(Text("the exact division is known once the target has recorded its placement map", "dim"))
    return Group(*parts)
