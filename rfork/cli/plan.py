"""`rfork plan`: who would read what from whom if replicas came now, and when each would be whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer
from pydantic import ValidationError
from rich.console import ConsoleRenderable, Group
from rich.text import Text
from rich.tree import Tree

from rfork import settings as options
from rfork.cli import format
from rfork.cli.completion import complete_model, complete_version
from rfork.cli.console import err, handle_errors, print_json, print_renderable
from rfork.cli.options import JsonOption, PlannerOption
from rfork.errors import PlannerRejected, UserError
from rfork.image.ranges import count
from rfork.planner_client.client import PlannerClient
from rfork.schema import Preview, PreviewPage, PreviewRequest, PreviewTarget
from rfork.settings import InstanceSettings
from rfork.weights_version import short

MAX_REPLICAS_DRAWN: Final = 64
"""Replicas of a rank that the tree shows one by one."""
RATE: Final = re.compile(
    r"(?P<number>\d+(?:\.\d+)?(?:e\d+)?)\s*(?:(?P<prefix>[kMGT]?)(?P<unit>B|bit|b|Byte)(?:/s|ps)?)?",
    re.IGNORECASE,
)
POWERS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
STORAGE: Final = "storage"


def rate_of(text: str) -> float:
    """Bytes a second: ``3GB/s``, ``25Gbit/s``, or a plain number of bytes. Raises UserError for others."""
    match = RATE.fullmatch(text.strip())
    number = float(match["number"]) * POWERS[(match["prefix"] or "").lower()] if match else 0.0
    if match is None or not 0 < number < 1e18:
        raise UserError(f"{text!r} is no rate", hint="for example 25Gbit/s, 3GB/s, or bytes a second")
    bits = match["unit"] is not None and (match["unit"].lower() == "bit" or match["unit"] == "b")
    return number / 8 if bits else number


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Name of the model; without, the one that the planner knows.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            metavar="VERSION",
            help="Version of the weights, or its beginning [default: the one that most instances serve]",
            autocompletion=complete_version,
        ),
    ] = None,
    targets: Annotated[
        int, typer.Option("--targets", "-n", min=1, max=1024, help="Replicas that would come together.")
    ] = 1,
    per_host: Annotated[
        int, typer.Option("--per-host", min=1, max=64, help="How many of them would share a host.")
    ] = 1,
    cold: Annotated[bool, typer.Option("--cold", help="As if nobody held the weights yet.")] = False,
    rank: Annotated[
        str | None,
        typer.Option("--rank", metavar="KEY", help="Only of this rank, by its key in `rfork status --json`."),
    ] = None,
    rack: Annotated[str | None, typer.Option("--rack", help="The rack that they would be in.")] = None,
    zone: Annotated[str | None, typer.Option("--zone", help="The zone that they would be in.")] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            metavar="RATE",
            help="One direction of a host's link, such as 25Gbit/s [default: as measured]",
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="RATE",
            help="Of storage for each reader, such as 3GB/s [default: as measured]",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="What it always is: nothing is started, planned or kept.")
    ] = False,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what would happen if replicas came now: who reads what from whom, and how long it takes.

    The planner's own policy decides, over the fleet as it is and replicas that do not exist. The seconds are
    those of the transfer alone, as the links would do it.
    """
    with handle_errors(as_json=as_json):
        wanted = {
            "rank_key": rank, "rack": rack, "zone": zone, "cold": cold,
            "targets": targets, "per_host": per_host,
            "link_bytes_per_s": None if link is None else rate_of(link),
            "storage_bytes_per_s": None if storage is None else rate_of(storage),
        }  # fmt: skip
        with PlannerClient.of(options.load(InstanceSettings, planner=planner)) as client:
            name = model or _only_model(client)
            full = None if version is None else _full_version(client, name, version)
            page = _request_preview(client, {"model": name, "version": full, **wanted})
        if as_json:
            print_json(page.model_dump(mode="json"))
            return
        for preview in page.items:
            print_renderable(render_tree(preview, alone=len(page.items) == 1))
        if not page.items:
            err.print("no instance has told yet how large its image is", markup=False)


def _request_preview(client: PlannerClient, wanted: Mapping[str, str | float | None]) -> PreviewPage:
    try:
        request = PreviewRequest.model_validate(wanted)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{first['loc'][0]}: {first['msg']}") from None
    try:
        return client.preview(request)
    except PlannerRejected as error:
        if error.problem not in ("unknown-model", "unknown-version"):
            raise
        detail = str(error).rpartition("/v1/previews: ")[2]
        hint = "`rfork status` shows the models, versions and ranks that are known"
        raise UserError(detail, hint=hint) from None


def _full_version(client: PlannerClient, model: str, text: str) -> str:
    """Return the known version of a model that begins with `text` or is shown so; `text` where none does."""
    known = {row.version for row in client.models() if row.model == model and row.version}
    found = sorted(each for each in known if each.startswith(text) or short(each) == text)
    if text in known or not found:
        return text
    if len(found) > 1:
        raise UserError(f"{text!r} could be any of {len(found)}: {', '.join(found[:5])}", hint="name more of it")
    return found[0]


def _only_model(client: PlannerClient) -> str:
    names = sorted({row.model for row in client.models()})
    if len(names) == 1:
        return names[0]
    if not names:
        raise UserError(
            "no instance of any model is known: there is nothing to go by",
            hint="start one, for example with `rfork seed MODEL_DIR`",
        )
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    raise UserError(
        f"the planner knows {format.plural(len(names), 'model')}: {', '.join(names[:5])}{more}",
        hint="name one: `rfork plan MODEL`",
    )


def render_tree(preview: Preview, *, alone: bool = True) -> ConsoleRenderable:
    """The plan as a tree, and what it comes to. `alone`: the model has no other rank."""
    title = " ".join(filter(None, (preview.model, format.version(preview.version))))
    title += "" if alone else f", rank {format.rank(preview.rank_key)}"
    head = f"{format.size(preview.image_bytes)} in {preview.chunk_count:,} chunks, "
    head += f"to {format.plural(len(preview.targets), 'replica')} that would come now"
    tree = Tree(Text.assemble((title, "bold"), ": ", head))
    parents = _parents(preview.targets)
    nodes: dict[str, Tree] = {}
    for drawn_count, (name, parent) in enumerate(parents.items()):
        if drawn_count == MAX_REPLICAS_DRAWN:
            left = len(parents) - drawn_count
            tree.add(Text(f"and {left:,} more: --json names them all", style="dim"))
            break
        target = next(each for each in preview.targets if each.instance_id == name)
        if parent not in nodes:
            nodes[parent] = tree.add(_root(parent, preview))
        nodes[name] = nodes[parent].add(_line(target, parent, preview))
    alone_reads = [each for each in preview.targets if not each.shares]
    if alone_reads:
        branch = tree.add(Text(f"{format.plural(len(alone_reads), 'replica')} with nobody to read from", "yellow"))
        for reason in dict.fromkeys(each.reason for each in alone_reads):
            branch.add(Text(reason, style="dim"))
    return Group(tree, *(Text(line) for line in summary(preview)))


def summary(preview: Preview) -> list[str]:
    """What the plan comes to, beside the bound and beside storage."""
    number, image = len(preview.targets), preview.image_bytes
    link, stored = format.rate(preview.link_bytes_per_s), format.rate(preview.storage_bytes_per_s)
    known = "as forks measured it" if preview.measured else "--link says it, if it is another"
    lines = []
    if preview.seconds is None:
        lines.append("each loads by itself: nobody holds it, and nobody is known to have a snapshot of it")
        if not preview.seeds:
            lines.append("--storage RATE plans as if each could read a snapshot")
    else:
        times = preview.seconds / preview.bound_s if preview.bound_s else 0.0
        lines.append(
            f"all are whole after {format.duration(preview.seconds)}: {times:.2f} times the bound of "
            f"{format.duration(preview.bound_s)}, one image over one link"
        )
        from_storage = format.size(preview.storage_bytes) if preview.storage_bytes else "nothing"
        lines.append(
            f"each from storage: {format.duration(image / preview.storage_bytes_per_s)}, and "
            f"{format.size(number * image)} are read from it; by this plan {from_storage}"
        )
        lines.append(f"links of {link} ({known}), storage of {stored} for each reader")
    return lines


def _parents(targets: Sequence[PreviewTarget]) -> dict[str, str]:
    """Under whom each target stands: of those that it reads from, one that stands nearest to the top.

    Sources that are there already, and storage, are at the top. In the order in which they are to be drawn.
    """
    own = {target.instance_id: target for target in targets}
    parents: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    frontier: list[str] = []
    for target in targets:
        for share in sorted(target.shares, key=lambda share: -count(share.chunks)):
            readers.setdefault(share.source_id, []).append(target.instance_id)
            outside = share.source_id not in own
            if target.instance_id not in parents and (outside or share.source_id == target.instance_id):
                parents[target.instance_id] = share.source_id if outside else STORAGE
                frontier.append(target.instance_id)
    for name in frontier:  # it grows meanwhile
        for reader in readers.get(name, ()):
            if reader not in parents:
                parents[reader] = name
                frontier.append(reader)
    return parents


def _root(name: str, preview: Preview) -> Text:
    if name == STORAGE:
        return Text(f"storage, {format.rate(preview.storage_bytes_per_s)} each", style="magenta")
    return Text.assemble((format.short(name), "green"), " is there already")


def _line(target: PreviewTarget, parent: str, preview: Preview) -> Text:
    first = target.instance_id if parent == STORAGE else parent
    reads = [
        _share(count(share.chunks), preview.chunk_count)
        + ("" if share.source_id == parent else f" from {_source_label(share.source_id, target)}")
        + _transport_suffix(target.transports, share.source_id)
        for share in sorted(target.shares, key=lambda share: (share.source_id != first, -count(share.chunks)))
    ]
    when = "never whole" if target.seconds is None else format.duration(target.seconds)
    host = f" on {target.host}" if target.host else ""
    return Text.assemble((target.instance_id, "cyan"), f"{host}: {', '.join(reads)}; ", (when, "bold"))


def _share(chunks: int, of: int) -> str:
    return "all" if chunks == of else f"{chunks / max(1, of):.0%}"


def _source_label(source_id: str, target: PreviewTarget) -> str:
    return STORAGE if source_id == target.instance_id else format.short(source_id)


def _transport_suffix(transports: Mapping[str, str], source_id: str) -> str:
    return f" over {transports[source_id]}" if source_id in transports else ""
