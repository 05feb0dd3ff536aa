"""`rfork status`: what runs, and who forks from whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.tree import Tree

from rfork import settings as options
from rfork.cli.console import escaped, out, print_json, reported
from rfork.cli.options import JsonOption, PlannerOption
from rfork.control.client import PlannerClient
from rfork.image import ranges
from rfork.settings import Settings
from rfork.wire import ForkView, InstanceView, ModelView

MOST_REASONS = 3
"""Of what went wrong on the way of a fork, the last ones that are shown."""
WORDS = {"serving": ("seed", "green"), "loading": ("relay", "cyan"), "draining": ("draining", "yellow")}


def status(planner: PlannerOption = None, as_json: JsonOption = False) -> None:
    """Show the models, instances and forks that the planner knows."""
    with reported(as_json=as_json):
        with PlannerClient.of(options.load(Settings, planner=planner)) as client:
            models, instances, forks = client.models(), client.instances(), client.forks()
        if as_json:
            print_json(
                {
                    "models": [model.model_dump(mode="json") for model in models],
                    "instances": [instance.model_dump(mode="json") for instance in instances],
                    "forks": [fork.model_dump(mode="json") for fork in forks],
                }
            )
            return
        if not instances:
            out.print("no instance is registered: start one with `rfork seed MODEL_DIR`")
            return
        # Unlike lines, tables and trees fold at the width there is: nothing is cut off.
        out.print(model_table(models), soft_wrap=False)
        out.print(fork_tree(instances, forks), soft_wrap=False)


def model_table(models: Sequence[ModelView]) -> Table:
    """What the fleet holds, and how many bytes of it came from storage and from one another."""
    table = Table()
    for heading in ("model", "rank"):
        table.add_column(heading, overflow="fold")
    for heading in ("size", "seeds", "relays", "forks", "storage", "forked"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in models:
        table.add_row(
            escaped(model.model),
            model.rank_key,
            _gigabytes(model.image_bytes),
            str(model.seeds),
            str(model.relays),
            str(model.forks_running),
            _gigabytes(model.storage_bytes),
            _gigabytes(model.forked_bytes),
        )
    return table


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f} GB"


def fork_tree(instances: Sequence[InstanceView], forks: Sequence[ForkView]) -> Tree:
    """Who reads (or read) from whom, as a tree; instances that no other gave to are its roots."""
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

    for instance_id in known:
        node(instance_id)
    return tree


def _line(view: InstanceView, latest: Mapping[str, ForkView]) -> str:
    report = view.report
    share = ranges.count(report.verified) / report.chunk_count if report.chunk_count else 1.0
    word, colour = WORDS[report.state]
    trouble = f"\n[red]quarantined: {escaped(view.quarantined)}[/]" if view.quarantined else ""
    fork = latest.get(report.instance_id)
    under_way = fork is not None and fork.state in ("planning", "running")
    reason = f"\n[dim]{escaped(fork.reason)}[/]" if fork is not None and under_way and fork.reason else ""
    if fork is not None and fork.finish is not None:
        # How it ended says little without what went wrong before.
        reason = "".join(f"\n[dim]{escaped(line)}[/]" for line in fork.finish.reasons[-MOST_REASONS:])
    return (
        f"[{colour}]{word}[/] {report.instance_id} {escaped(report.model)} "
        f"on {escaped(report.placement.host)} {share:.0%} verified, {len(report.readers)} readers"
        f"{trouble}{reason}"
    )
