"""`rfork plan`: predict sources and duration of new replicas, without starting any."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Final

import typer
from pydantic import ValidationError
from rich.console import ConsoleRenderable, Group
from rich.text import Text
from rich.tree import Tree

from rfork import settings as options
from rfork.cli import formatters
from rfork.cli.console import err, handle_errors, print_json, print_renderable
from rfork.cli.options import JsonOption, PlannerOption, planner_client
from rfork.errors import PlannerRejected, UserError
from rfork.image.ranges import count
from rfork.planner_client.client import PlannerClient
from rfork.schema import Preview, PreviewPage, PreviewRequest, PreviewTarget
from rfork.settings import InstanceSettings
from rfork.weights_version import short

MAX_REPLICAS_DRAWN: Final = 64
"""Maximum number of replicas of a rank drawn individually."""
RATE: Final = re.compile(
    r"(?P<number>\d+(?:\.\d+)?(?:e\d+)?)\s*(?:(?P<prefix>[kMGT]?)(?P<unit>B|bit|b|Byte)(?:/s|ps)?)?", re.IGNORECASE
)
POWERS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
STORAGE: Final = "storage"
OPTION_OF: Final = {
    "model": "MODEL",
    "rank_key": "--rank",
    "link_bytes_per_s": "--link",
    "storage_bytes_per_s": "--storage",
}
"""Options by the field of the request, if their names differ."""


def rate_of(text: str) -> float:
    """Parse ``3GB/s``, ``25Gbit/s`` or a plain number into bytes per second. Raises UserError."""
    match = RATE.fullmatch(text.strip())
    number = float(match["number"]) * POWERS[(match["prefix"] or "").lower()] if match else 0.0
    if match is None or not 0 < number < 1e18:
        raise UserError(f"{text!r} is not a rate", hint="for example 25Gbit/s, 3GB/s, or bytes per second")
    bits = match["unit"] is not None and (match["unit"].lower() == "bit" or match["unit"] == "b")
    return number / 8 if bits else number


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Name of the model; required if the planner knows several.", show_default=False
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            metavar="VERSION",
            help="Version of the weights, or a unique prefix [default: the version that most instances serve]",
        ),
    ] = None,
    targets: Annotated[
        int, typer.Option("--targets", "-n", min=1, max=1024, help="Number of replicas that start together.")
    ] = 1,
    per_host: Annotated[int, typer.Option("--per-host", min=1, max=64, help="Number of these replicas per host.")] = 1,
    cold: Annotated[bool, typer.Option("--cold", help="Assume that no instance has the weights.")] = False,
    rank: Annotated[
        str | None,
        typer.Option("--rank", metavar="KEY", help="Show only this rank, by its key in `rfork status --json`."),
    ] = None,
    rack: Annotated[str | None, typer.Option("--rack", help="Rack of the new replicas.")] = None,
    zone: Annotated[str | None, typer.Option("--zone", help="Zone of the new replicas.")] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            metavar="RATE",
            help="Link speed of a host in one direction, such as 25Gbit/s [default: as measured]",
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", metavar="RATE", help="Storage speed per reader, such as 3GB/s [default: as measured]"
        ),
    ] = None,
    from_layouts: Annotated[
        bool,
        typer.Option(
            "--from-layouts",
            help="Show what instances with other layouts would send, to the rank of --rank if one runs.",
        ),
    ] = False,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict how new replicas would fork: sources, transports and duration.

    Runs the planner's policy on the current fleet plus replicas that do not exist. Durations cover the
    transfer only, at the speed of the links.
    """
    with handle_errors(as_json=as_json):
        overrides = {
            "rank_key": rank, "rack": rack, "zone": zone, "cold": cold,
            "targets": targets, "per_host": per_host,
            "link_bytes_per_s": None if link is None else rate_of(link),
            "storage_bytes_per_s": None if storage is None else rate_of(storage),
        }  # fmt: skip
        with planner_client(planner) as client:
            name = model or _only_model(client)
            full = None if version is None else _full_version(client, name, version)
            if from_layouts:
                if cold or targets > 1 or per_host > 1:
                    raise UserError("--from-layouts shows one replica: it excludes --cold, --targets and --per-host")
                _show_layouts(client, name, full, rank, planner, as_json=as_json)
                return
            page = _request_preview(client, {"model": name, "version": full, **overrides})
        if as_json:
            print_json(page.model_dump(mode="json"))
            return
        for preview in page.items:
            print_renderable(render_tree(preview, alone=len(page.items) == 1))
        if not page.items:
            err.print("no instance has reported the size of its image yet")


def _show_layouts(
    client: PlannerClient, model: str, version: str | None, rank: str | None, planner: str | None, *, as_json: bool
) -> None:
    from rfork.cli.layouts_preview import query_preview, render_layouts  # imports torch

    preview = query_preview(client, model, version, rank, options.load(InstanceSettings, planner=planner))
    if as_json:
        print_json(asdict(preview))
    else:
        print_renderable(render_layouts(preview, rank))


def _request_preview(client: PlannerClient, fields: Mapping[str, str | float | None]) -> PreviewPage:
    try:
        request = PreviewRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise UserError(f"{OPTION_OF.get(name, '--' + name.replace('_', '-'))}: {first['msg']}") from None
    try:
        return client.preview(request)
    except PlannerRejected as error:
        if error.problem not in ("unknown-model", "unknown-version"):
            raise
        detail = str(error).rpartition("/v1/previews: ")[2]
        hint = "`rfork status` lists known models, versions and ranks"
        raise UserError(detail, hint=hint) from None


def _full_version(client: PlannerClient, model: str, text: str) -> str:
    """Return the known version that matches a prefix or short form; `text` itself if none does."""
    known = {row.version for row in client.models() if row.model == model and row.version}
    found = sorted(each for each in known if each.startswith(text) or short(each) == text)
    if text in known or not found:
        return text
    if len(found) > 1:
        raise UserError(
            f"{text!r} is ambiguous, {len(found)} versions match: {formatters.first_names(found)}",
            hint="type more of it",
        )
    return found[0]


def _only_model(client: PlannerClient) -> str:
    names = sorted({row.model for row in client.models()})
    if len(names) == 1:
        return names[0]
    if not names:
        raise UserError(
            "the planner knows no model: there is nothing to plan with",
            hint="start an instance, for example with `rfork seed MODEL_DIR`",
        )
    raise UserError(
        f"the planner knows {formatters.plural(len(names), 'model')}: {formatters.first_names(names)}",
        hint="select one: `rfork plan MODEL`",
    )


def render_tree(preview: Preview, *, alone: bool = True) -> ConsoleRenderable:
    """Return the plan as a tree, followed by a summary. `alone`: the model has no other rank."""
    title = " ".join(filter(None, (preview.model, formatters.version(preview.version))))
    title += "" if alone else f", rank {formatters.rank(preview.rank_key)}"
    head = f"{formatters.size(preview.image_bytes)} in {formatters.plural(preview.chunk_count, 'chunk')}, "
    head += f"to {formatters.plural(len(preview.targets), 'new replica')}"
    tree = Tree(Text.assemble((title, "bold"), ": ", head))
    parents = _parents(preview.targets)
    nodes: dict[str, Tree] = {}
    for drawn_count, (name, parent) in enumerate(parents.items()):
        if drawn_count == MAX_REPLICAS_DRAWN:
            left = len(parents) - drawn_count
            tree.add(Text(f"and {left:,} more: use --json to list all", style="dim"))
            break
        target = next(each for each in preview.targets if each.instance_id == name)
        if parent not in nodes:
            storage_rate = formatters.rate(preview.storage_bytes_per_s)
            nodes[parent] = tree.add(
                Text(f"{STORAGE}, {storage_rate} per reader", style="magenta")
                if parent == STORAGE
                else Text.assemble((formatters.short(parent), "green"), " (running)")
            )
        nodes[name] = nodes[parent].add(_line(target, parent, preview))
    unserved = [each for each in preview.targets if not each.shares]
    if unserved:
        branch = tree.add(Text(f"{formatters.plural(len(unserved), 'replica')} without a source", "yellow"))
        for reason in dict.fromkeys(each.reason for each in unserved):
            branch.add(Text(reason, style="dim"))
    return Group(tree, *(Text(line) for line in summary(preview)))


def summary(preview: Preview) -> list[str]:
    """Return a summary of the plan: total time, lower bound, and the time from storage."""
    number, image = len(preview.targets), preview.image_bytes
    link, stored = formatters.rate(preview.link_bytes_per_s), formatters.rate(preview.storage_bytes_per_s)
    origin = "measured by forks" if preview.measured else "assumed; override with --link"
    lines = []
    if preview.seconds is None:
        lines.append("each replica loads without peers: no instance has the weights, and no snapshot is known")
        if not preview.seeds:
            lines.append("use --storage RATE to plan as if each replica could read a snapshot")
    else:
        times = preview.seconds / preview.bound_s if preview.bound_s else 0.0
        lines.append(
            f"all complete after {formatters.duration(preview.seconds)}: {times:.2f} times the lower bound of "
            f"{formatters.duration(preview.bound_s)}, one image over one link"
        )
        from_storage = formatters.size(preview.storage_bytes) if preview.storage_bytes else "nothing"
        lines.append(
            f"if each read from storage: {formatters.duration(image / preview.storage_bytes_per_s)}, "
            f"{formatters.size(number * image)} read from storage; with this plan: {from_storage}"
        )
        lines.append(f"link {link} ({origin}), storage {stored} per reader")
    return lines


def _parents(targets: Sequence[PreviewTarget]) -> dict[str, str]:
    """Return the parent of each target in the tree: of its sources, the one nearest to the root.

    Existing sources and storage are roots. The result is in drawing order.
    """
    new_targets = {target.instance_id for target in targets}
    parents: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    frontier: list[str] = []
    for target in targets:
        for share in sorted(target.shares, key=lambda share: -count(share.chunks)):
            readers.setdefault(share.source_id, []).append(target.instance_id)
            is_external = share.source_id not in new_targets
            if target.instance_id not in parents and (is_external or share.source_id == target.instance_id):
                parents[target.instance_id] = share.source_id if is_external else STORAGE
                frontier.append(target.instance_id)
    for name in frontier:  # grows during the loop
        for reader in readers.get(name, ()):
            if reader not in parents:
                parents[reader] = name
                frontier.append(reader)
    return parents


def _line(target: PreviewTarget, parent: str, preview: Preview) -> Text:
    first = target.instance_id if parent == STORAGE else parent
    reads = []
    for share in sorted(target.shares, key=lambda share: (share.source_id != first, -count(share.chunks))):
        chunks, transport = count(share.chunks), target.transports.get(share.source_id)
        read = "all" if chunks == preview.chunk_count else f"{chunks / max(1, preview.chunk_count):.0%}"
        if share.source_id == target.instance_id:
            read += f" from {STORAGE}"
        elif share.source_id != parent:
            read += f" from {formatters.short(share.source_id)}"
        reads.append(f"{read} over {transport}" if transport is not None else read)
    when = "never complete" if target.seconds is None else formatters.duration(target.seconds)
    host = f" on {target.host}" if target.host else ""
    return Text.assemble((target.instance_id, "cyan"), f"{host}: {', '.join(reads)}; ", (when, "bold"))
