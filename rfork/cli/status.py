"""`rfork status`: what runs, and who forks from whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.tree import Tree

from rfork import settings as options
from rfork.cli import fleet, units
from rfork.cli.completion import complete_model
from rfork.cli.console import escaped, out, print_json, reported, show
from rfork.cli.fleet import Fleet
from rfork.cli.options import JsonOption, PlannerOption
from rfork.cli.tables import Column, Fitting
from rfork.control.client import PlannerClient
from rfork.control.planner_clock import MAX_SKEW_S
from rfork.image import ranges
from rfork.settings import Settings
from rfork.wire import ForkView, InstanceView, ModelView

MOST_INSTANCES = 50
"""Instances that the tree shows, unless --limit says otherwise."""
MOST_REASONS = 3
"""Of what went wrong on the way of a fork, the last ones that are shown."""
WORDS = {"serving": ("seed", "green"), "loading": ("relay", "cyan"), "draining": ("draining", "yellow")}


def status(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="Only what is about this model.", autocompletion=complete_model
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, metavar="N", help="Most instances to show in the tree.")
    ] = MOST_INSTANCES,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the models, instances and forks that the planner knows: who holds what, who reads from whom."""
    with reported(as_json=as_json):
        with PlannerClient.of(options.load(Settings, planner=planner)) as client:
            seen = Fleet.of(client, model)
        if as_json:
            print_json(seen.to_dict())
            return
        if not seen.instances:
            what = f"of {model} " if model is not None else ""
            out.print(f"no instance {what}is registered: start one with `rfork seed MODEL_DIR`", markup=False)
            return
        show(model_table(seen.models))
        out.print()
        show(fork_tree(seen.instances, seen.forks, limit))


def model_table(models: Sequence[ModelView]) -> Fitting:
    """What the fleet holds, and how many bytes of it came from storage and from one another."""
    columns = (
        Column("model", least=12),
        Column("version", least=8, spare=1),
        Column("size", right=True),
        Column("seeds", right=True),
        Column("relays", right=True, spare=4),
        Column("forks", right=True),
        Column("storage", right=True, spare=3),
        Column("forked", right=True, spare=2),
    )
    rows = [
        (
            title,
            units.version(row.version),
            units.size(row.image_bytes),
            f"{row.seeds:,}",
            f"{row.relays:,}",
            f"{row.forks_running:,}",
            units.size(row.storage_bytes),
            units.size(row.forked_bytes),
        )
        for title, row in zip(fleet.titles(models), models, strict=True)
    ]
    return Fitting(columns, rows)


def fork_tree(
    instances: Sequence[InstanceView], forks: Sequence[ForkView], most: int = MOST_INSTANCES
) -> Tree:
    """Who reads (or read) from whom, as a tree; instances that no other gave to are its roots.

    At most so many instances are shown: first those under way or in trouble, and those above them.
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
        # From the instance up to a root, or to one that is there: a chain may be longer than Python's stack.
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
        if len(nodes) >= most:
            left = units.plural(len(known) - len(nodes), "more instance")
            tree.add(f"[dim]{left}: --limit {len(known)} shows them, --model NAME one model's[/]")
            break
        node(instance_id)
    return tree


def _urgent(view: InstanceView, latest: Mapping[str, ForkView]) -> bool:
    fork = latest.get(view.report.instance_id)
    return bool(fleet.trouble_of(view)) or (fork is not None and fork.finish is None)


def _line(view: InstanceView, latest: Mapping[str, ForkView]) -> str:
    report = view.report
    share = ranges.count(report.verified) / report.chunk_count if report.chunk_count else 1.0
    word, colour = WORDS[report.state]
    trouble = f"\n[red]{escaped(wrong)}[/]" if (wrong := fleet.trouble_of(view)) else ""
    fork = latest.get(report.instance_id)
    under_way = fork is not None and fork.state in ("planning", "running")
    reason = f"\n[dim]{escaped(fork.reason)}[/]" if fork is not None and under_way and fork.reason else ""
    if fork is not None and fork.finish is not None:
        # How it ended says little without what went wrong before.
        reason = "".join(f"\n[dim]{escaped(line)}[/]" for line in fork.finish.reasons[-MOST_REASONS:])
    skew_s = report.clock_skew_s or 0.0
    if abs(skew_s) > MAX_SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        trouble += f"\n[yellow]clock {abs(skew_s):.0f} s {side} the planner's: synchronise it (NTP)[/]"
    readers = units.plural(len(report.readers), "reader")
    model = " ".join(filter(None, (report.model, units.version(view.version))))
    return (
        f"[{colour}]{word}[/] {report.instance_id} {escaped(model)} "
        f"on {escaped(report.placement.host)} {share:.0%} verified, {readers}{trouble}{reason}"
    )
