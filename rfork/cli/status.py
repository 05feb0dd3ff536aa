"""`rfork status`: models, instances, forks and holders, and which instance forked from which."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final

import typer
from rich.text import Text
from rich.tree import Tree

from rfork.cli import fleet_queries, formatters
from rfork.cli.console import Cell, Column, FittedTable, err, handle_errors, out, print_json, print_renderable
from rfork.cli.fleet_queries import FleetState
from rfork.cli.options import JsonOption, ModelFilterOption, PlannerOption, planner_client
from rfork.errors import PlannerRejected, PlannerUnreachable, SettingsError
from rfork.image import ranges
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.planner_clock import MAX_SKEW_S
from rfork.schema import (
    ForkEvent,
    ForkInfo,
    ForkState,
    HeldImage,
    HolderInfo,
    InstanceInfo,
    RefusedImage,
    WantedImage,
)

MAX_INSTANCES: Final = 50
"""Instances shown in the tree unless --limit is set."""
MAX_FORKS: Final = 20
"""Forks listed unless --limit is set."""
MAX_IMAGES: Final = 20
"""Images of holders listed unless --limit is set."""
MAX_REASONS: Final = 3
"""Failure reasons shown per fork; the latest are kept."""
RECONNECT_S: Final = 2.0
"""Pause before reconnecting to a planner that became unreachable."""


def status(
    model: ModelFilterOption = None,
    forks: Annotated[
        bool, typer.Option("--forks", help="List forks, newest first, instead of models and instances.")
    ] = False,
    state: Annotated[ForkState | None, typer.Option("--state", help="With --forks: show only this state.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="With --forks: print each change until interrupted.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            metavar="N",
            help=f"Maximum number of instances to show [default: {MAX_INSTANCES}] and of images of holders "
            f"[default: {MAX_IMAGES}], or of forks with --forks [default: {MAX_FORKS}]; with --follow, exit after "
            "N changes.",
            show_default=False,
        ),
    ] = None,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show models, instances, forks and holders, and which instance forked from which.

    `rfork explain FORK` explains one fork.
    """
    with handle_errors(as_json=as_json):
        if not forks and (follow or state is not None):
            raise SettingsError(f"{'--follow' if follow else '--state'} requires --forks")
        with planner_client(planner) as client:
            if forks:
                print_forks = _follow_forks if follow else _list_forks
                print_forks(client, model, state, limit, as_json=as_json)
                return
            seen = FleetState.of(client, model)
        if as_json:
            print_json(seen.to_dict())
            return
        if not seen.instances and not seen.holders:
            of_model = f"of {model} " if model is not None else ""
            out.print(f"no instance {of_model}is registered: start one with `rfork seed MODEL_DIR`")
            return
        print_renderable(fleet_queries.model_table(seen.models, "model"))
        out.print()
        print_renderable(fork_tree(seen.instances, seen.forks, limit or MAX_INSTANCES))
        if seen.holders:
            out.print()
            _print_holders(seen.holders, limit or MAX_IMAGES)


def fork_tree(instances: Sequence[InstanceInfo], forks: Sequence[ForkInfo], max_instances: int = MAX_INSTANCES) -> Tree:
    """Return the tree of instances, each below its main source; instances without a source are roots.

    Shows at most `max_instances`: first those with a running fork or a problem, and the instances above them.
    """
    latest = fleet_queries.latest_forks(forks)
    parents: dict[str, str] = {}
    for target, fork in latest.items():
        peers = [share for share in fork.plan if share.source_id != target]
        if peers:
            parents[target] = max(peers, key=lambda share: ranges.count(share.chunks)).source_id
    known = {view.report.instance_id: view for view in instances}
    tree = Tree("instances")
    nodes: dict[str, Tree] = {}

    def add(instance_id: str) -> None:
        # Iterative, because a chain of forks may be longer than Python's stack.
        path: dict[str, None] = {}
        above: str | None = instance_id
        while above in known and above not in nodes and above not in path:
            path[above] = None
            above = parents.get(above)
        root = nodes.get(above, tree) if above is not None else tree
        for each in reversed(path):
            root = nodes[each] = root.add(_instance_text(known[each], latest.get(each)))

    for instance_id in sorted(known, key=lambda name: not _is_urgent(known[name], latest)):
        if len(nodes) >= max_instances:
            left = formatters.plural(len(known) - len(nodes), "more instance")
            tree.add(Text(f"{left}: use --limit {len(known)} to show all, or --model NAME", "dim"))
            break
        add(instance_id)
    return tree


def _print_holders(holders: Sequence[HolderInfo], max_rows: int) -> None:
    rows = holder_rows(holders)
    columns = (
        Column(f"holders ({len(holders)})", min_width=12),
        Column("memory", right=True, priority=3),
        Column("model", min_width=8),
        Column("version", min_width=8, priority=1),
        Column("size", right=True, priority=2),
        Column("state"),
        Column("idle", right=True, priority=4),
        Column("reason", min_width=10, priority=5),
    )
    print_renderable(FittedTable(columns, rows[:max_rows]))
    if len(rows) > max_rows:
        err.print(f"{len(rows) - max_rows:,} images of holders not shown; use --limit {len(rows)} to list all")


def holder_rows(holders: Sequence[HolderInfo]) -> list[tuple[Cell, ...]]:
    """Return one row for each image of each holder: kept ones, then refused ones. Holders with problems come first.

    Host and memory are in the first row of a holder.
    """
    rows: list[tuple[Cell, ...]] = []
    for holder in sorted(holders, key=lambda each: (not _has_problem(each), each.report.placement.host)):
        report = holder.report
        memory = f"{formatters.size(report.used_bytes)} of {formatters.size(report.memory_bytes)}"
        images = [_image_cells(image, holder) for image in report.images] + [
            _refused_cells(image) for image in report.refused
        ]
        if holder.age_s > fleet_queries.SILENT_S:
            images.insert(0, ("", "", "", Text("silent", "red"), "", f"no report for {holder.age_s:.0f} s"))
        for number, cells in enumerate(images or [("", "", "", Text("empty", "dim"), "", "")]):
            rows.append((report.placement.host, memory, *cells) if not number else ("", "", *cells))
    return rows


def _has_problem(holder: HolderInfo) -> bool:
    return bool(holder.report.refused) or holder.age_s > fleet_queries.SILENT_S


def _image_cells(image: HeldImage, holder: HolderInfo) -> tuple[Cell, ...]:
    wanted = [each for each in holder.wanted if _weights(each) == _weights(image)]
    return (
        formatters.model(image.model, image.rank.key),
        formatters.version(image.version),
        formatters.size(image.image_bytes),
        Text(image.state, "green" if image.state == "ready" else "cyan"),
        formatters.age(image.idle_s) if image.state == "ready" else "",
        (wanted[0].reason or wanted[0].cause) if wanted else Text("no longer wanted", "dim"),
    )


def _weights(image: HeldImage | WantedImage) -> tuple[str, str | None, str, str]:
    return image.model, image.version, image.rank.key, image.layout_id


def _refused_cells(image: RefusedImage) -> tuple[Cell, ...]:
    return (
        formatters.model(image.model, image.rank_key),
        formatters.version(image.version),
        "",
        Text("refused", "yellow"),
        "",
        image.reason,
    )


def _is_urgent(view: InstanceInfo, latest: Mapping[str, ForkInfo]) -> bool:
    fork = latest.get(view.report.instance_id)
    return bool(fleet_queries.instance_problem(view)) or (fork is not None and fork.finish is None)


def _instance_text(view: InstanceInfo, fork: ForkInfo | None) -> Text:
    report = view.report
    share = ranges.count(report.verified) / report.chunk_count if report.chunk_count else 1.0
    model = " ".join(filter(None, (report.model, formatters.version(view.version))))
    readers = formatters.plural(len(report.readers), "reader")
    text = Text.assemble(
        fleet_queries.role_of(view),
        f" {report.instance_id} {model} on {report.placement.host} {share:.0%} verified, {readers}",
    )
    if problem := fleet_queries.instance_problem(view):
        text.append(f"\n{problem}", "red")
    skew_s = report.clock_skew_s or 0.0
    if abs(skew_s) > MAX_SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        text.append(f"\nclock {abs(skew_s):.0f} s {side} the planner's: synchronise it (NTP)", "yellow")
    if fork is not None and fork.finish is not None:
        # The outcome means little without the errors before it.
        text.append("".join(f"\n{reason}" for reason in fork.finish.reasons[-MAX_REASONS:]), "dim")
    elif fork is not None and fork.state in fleet_queries.RUNNING_STATES and fork.reason:
        text.append(f"\n{fork.reason}", "dim")
    return text


def _list_forks(
    client: PlannerClient, model: str | None, state: ForkState | None, limit: int | None, *, as_json: bool
) -> None:
    """Print forks, newest first, at most `limit` (default: `MAX_FORKS`)."""
    found = sorted(client.forks(model=model, state=state), key=lambda fork: fork.age_s)
    listed = found[: limit or MAX_FORKS]
    if as_json:
        print_json({"forks": [fork.model_dump(mode="json") for fork in listed], "total": len(found)})
        return
    if not found:
        which = f"{state} " if state else ""
        err.print(f"no {which}forks{f' of {model}' if model else ''}")
        return
    print_renderable(_fork_table(listed))
    if len(found) > len(listed):
        err.print(f"{len(found) - len(listed):,} older forks not shown; use --limit {len(found)} to list all")


def _follow_forks(
    client: PlannerClient, model: str | None, state: ForkState | None, limit: int | None, *, as_json: bool
) -> None:
    """Print each change of a fork as one line, until interrupted or after `limit` changes."""
    printed = 0
    for event in _events(client, model):
        if state not in (None, event.fork.state):
            continue
        if as_json:
            print_json(event.model_dump(mode="json"))
        else:
            out.print(f"{time.strftime('%H:%M:%S')} {_event_line(event)}")
        printed += 1
        if printed == limit:
            return


def _fork_table(listed: Sequence[ForkInfo]) -> FittedTable:
    columns = (
        Column("fork"),
        Column("started", right=True, priority=4),
        Column("state"),
        Column("model", min_width=8, priority=1),
        Column("version", min_width=8, priority=3),
        Column("size", right=True, priority=6),
        Column("time", right=True),
        Column("rate", right=True, priority=5),
        Column("sources", min_width=8, priority=2),
        Column("last error", min_width=8, priority=7),
    )
    return FittedTable(columns, [_fork_row(fork) for fork in listed])


def _fork_row(fork: ForkInfo) -> tuple[Cell, ...]:
    speed = fleet_queries.rate_of(fork)
    share = "" if fork.finish is not None else f" {fleet_queries.verified_share(fork):.0%}"
    return (
        fork.fork_id[:12],
        f"{formatters.age(fork.age_s)} ago",
        fleet_queries.phase_text(fork).append(share),
        formatters.model(fork.model, fork.rank.key),
        formatters.version(fork.version),
        formatters.size(fork.image_bytes),
        formatters.duration(fork.finish.seconds if fork.finish is not None else fork.age_s),
        formatters.rate(speed) if speed else "-",
        fleet_queries.sources_text(fork) or "-",
        fleet_queries.last_error(fork),
    )


def _events(client: PlannerClient, model: str | None) -> Iterator[ForkEvent]:
    """Yield fork events indefinitely and reconnect when the planner restarts. An error of the first call is raised."""
    was_connected = False
    while True:
        try:
            with client.events(model=model) as stream:
                if was_connected:
                    err.print(f"reconnected to planner {client.url}")
                was_connected = True
                yield from stream
            reason = f"planner {client.url} closed the stream"
        except (PlannerUnreachable, PlannerRejected) as error:
            if not was_connected or (isinstance(error, PlannerRejected) and error.status < 500):
                raise
            reason = str(error)
        err.print(f"{reason}; reconnecting")
        time.sleep(RECONNECT_S)


def _event_line(event: ForkEvent) -> str:
    """Return a change of a fork as one line."""
    fork = event.fork
    sources = fleet_queries.sources_text(fork) or "-"
    speed = fleet_queries.rate_of(fork)
    model = " ".join(filter(None, (formatters.model(fork.model, fork.rank.key), formatters.version(fork.version))))
    name = f"{fork.fork_id[:12]} {model} on {formatters.short(fork.instance_id)}"
    if fork.finish is not None:
        at = f", {formatters.rate(speed)}" if speed else ""
        fallback = f", {fork.finish.fallback}" if fork.finish.fallback else ""
        detail = fleet_queries.last_error(fork) or f"from {sources}"
        return f"{name}: {fork.finish.outcome} in {formatters.duration(fork.finish.seconds)}{at}{fallback}, {detail}"
    if event.kind == "planned":
        return f"{name}: {'planned' if fork.plan else 'waiting'}, {fork.reason or sources}"
    left_s = fleet_queries.eta_s(fork)
    left = f", {formatters.duration(left_s)} left" if left_s is not None else ""
    phase, share = fleet_queries.phase_of(fork), fleet_queries.verified_share(fork)
    return f"{name}: {phase} {share:.0%}, {formatters.rate(speed)}{left}, from {sources}"
