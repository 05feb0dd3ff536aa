"""`rfork status`: models, instances and forks, and which instance forked from which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.tree import Tree

from rfork import settings as options
from rfork.cli import fleet_queries, formatters
from rfork.cli.completion import complete_model
from rfork.cli.console import escaped, handle_errors, out, print_json, print_renderable
from rfork.cli.fleet_queries import FleetState
from rfork.cli.forks import DEFAULT_LIMIT, follow_forks, list_forks
from rfork.cli.options import JsonOption, PlannerOption
from rfork.cli.tables import Column, FittedTable
from rfork.errors import SettingsError
from rfork.image import ranges
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.planner_clock import MAX_SKEW_S
from rfork.schema import ForkInfo, InstanceInfo, ModelInfo
from rfork.schema.types import ForkState
from rfork.settings import InstanceSettings

MAX_INSTANCES = 50
"""Instances shown in the tree unless --limit is set."""
MAX_REASONS = 3
"""Failure reasons shown per fork; the latest are kept."""
WORDS = {"serving": ("seed", "green"), "loading": ("relay", "cyan"), "draining": ("draining", "yellow")}


def status(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Show only this model.", autocompletion=complete_model),
    ] = None,
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
            help=f"Maximum number of instances to show [default: {MAX_INSTANCES}], or of forks with --forks "
            f"[default: {DEFAULT_LIMIT}]; with --follow, exit after N changes.",
            show_default=False,
        ),
    ] = None,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show models, instances and forks, and which instance forked from which.

    `rfork explain FORK` explains one fork.
    """
    with handle_errors(as_json=as_json):
        if not forks and (follow or state is not None):
            raise SettingsError(f"{'--follow' if follow else '--state'} requires --forks")
        with PlannerClient.of(options.load(InstanceSettings, planner=planner)) as client:
            if forks:
                print_forks = follow_forks if follow else list_forks
                print_forks(client, model, state, limit, as_json=as_json)
                return
            seen = FleetState.of(client, model)
        if as_json:
            print_json(seen.to_dict())
            return
        if not seen.instances:
            of_model = f"of {model} " if model is not None else ""
            out.print(f"no instance {of_model}is registered: start one with `rfork seed MODEL_DIR`", markup=False)
            return
        print_renderable(model_table(seen.models))
        out.print()
        print_renderable(fork_tree(seen.instances, seen.forks, limit or MAX_INSTANCES))


def model_table(models: Sequence[ModelInfo]) -> FittedTable:
    """Return a table of the models, with the bytes read from storage and from peers."""
    columns = (
        Column("model", min_width=12),
        Column("version", min_width=8, priority=1),
        Column("size", right=True),
        Column("seeds", right=True),
        Column("relays", right=True, priority=4),
        Column("forks", right=True),
        Column("storage", right=True, priority=3),
        Column("forked", right=True, priority=2),
    )
    rows = [
        (
            title,
            formatters.version(row.version),
            formatters.size(row.image_bytes),
            f"{row.seeds:,}",
            f"{row.relays:,}",
            f"{row.forks_running:,}",
            formatters.size(row.storage_bytes),
            formatters.size(row.forked_bytes),
        )
        for title, row in zip(fleet_queries.model_titles(models), models, strict=True)
    ]
    return FittedTable(columns, rows)


def fork_tree(instances: Sequence[InstanceInfo], forks: Sequence[ForkInfo], max_instances: int = MAX_INSTANCES) -> Tree:
    """Return the tree of instances, each below its main source; instances without a source are roots.

    Shows at most `max_instances`: first those with a running fork or a problem, and the instances above them.
    """
    latest = {fork.instance_id: fork for fork in sorted(forks, key=lambda fork: -fork.age_s)}
    parents: dict[str, str] = {}
    for target, fork in latest.items():
        peers = [share for share in fork.plan if share.source_id != target]
        if peers:
            parents[target] = max(peers, key=lambda share: ranges.count(share.chunks)).source_id
    known = {view.report.instance_id: view for view in instances}
    tree = Tree("instances")
    nodes: dict[str, Tree] = {}

    def node(instance_id: str) -> Tree:
        # Iterative, because a chain of forks may be longer than Python's stack.
        path: dict[str, None] = {}
        above: str | None = instance_id
        while above in known and above not in nodes and above not in path:
            path[above] = None
            above = parents.get(above)
        root = nodes.get(above, tree) if above is not None else tree
        for each in reversed(path):
            root = nodes[each] = root.add(_line(known[each], latest))
        return root

    for instance_id in sorted(known, key=lambda name: not _urgent(known[name], latest)):
        if len(nodes) >= max_instances:
            left = formatters.plural(len(known) - len(nodes), "more instance")
            tree.add(f"[dim]{left}: use --limit {len(known)} to show all, or --model NAME[/]")
            break
        node(instance_id)
    return tree


def _urgent(view: InstanceInfo, latest: Mapping[str, ForkInfo]) -> bool:
    fork = latest.get(view.report.instance_id)
    return bool(fleet_queries.instance_problem(view)) or (fork is not None and fork.finish is None)


def _line(view: InstanceInfo, latest: Mapping[str, ForkInfo]) -> str:
    report = view.report
    share = ranges.count(report.verified) / report.chunk_count if report.chunk_count else 1.0
    word, colour = WORDS[report.state]
    problem_text = f"\n[red]{escaped(wrong)}[/]" if (wrong := fleet_queries.instance_problem(view)) else ""
    fork = latest.get(report.instance_id)
    is_running = fork is not None and fork.state in ("planning", "running")
    reason = f"\n[dim]{escaped(fork.reason)}[/]" if fork is not None and is_running and fork.reason else ""
    if fork is not None and fork.finish is not None:
        # The outcome means little without the errors before it.
        reason = "".join(f"\n[dim]{escaped(line)}[/]" for line in fork.finish.reasons[-MAX_REASONS:])
    skew_s = report.clock_skew_s or 0.0
    if abs(skew_s) > MAX_SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        problem_text += f"\n[yellow]clock {abs(skew_s):.0f} s {side} the planner's: synchronise it (NTP)[/]"
    readers = formatters.plural(len(report.readers), "reader")
    model = " ".join(filter(None, (report.model, formatters.version(view.version))))
    return (
        f"[{colour}]{word}[/] {report.instance_id} {escaped(model)} "
        f"on {escaped(report.placement.host)} {share:.0%} verified, {readers}{problem_text}{reason}"
    )
