"""`rfork status`: what runs, and who forks from whom."""

from __future__ import annotations

from rich.table import Table
from rich.tree import Tree

from rfork import settings as options
from rfork.cli.console import escaped, out, print_json, reported
from rfork.cli.options import JsonOption, PlannerOption
from rfork.control.client import PlannerClient
from rfork.errors import SettingsError
from rfork.image import ranges
from rfork.settings import Settings
from rfork.wire import ForkView, InstanceView


def status(planner: PlannerOption = None, as_json: JsonOption = False) -> None:
    """Show the models, instances and forks that the planner knows."""
    with reported(as_json=as_json):
        chosen = options.load(Settings, planner=planner)
        if chosen.planner is None:
            raise SettingsError("no planner is set", hint="pass --planner URL or set RFORK_PLANNER")
        token = chosen.token.get_secret_value() if chosen.token is not None else None
        with PlannerClient(
            chosen.planner, token=token, tls=chosen.tls, timeout_s=chosen.planner_timeout_s
        ) as client:
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
        table = Table("model", "rank", "size", "seeds", "relays", "forks running")
        for model in models:
            table.add_row(
                escaped(model.model),
                model.rank_key,
                f"{model.image_bytes / 1e9:.3f} GB",
                str(model.seeds),
                str(model.relays),
                str(model.forks_running),
            )
        out.print(table)
        out.print(fork_tree(instances, forks))


def fork_tree(instances: list[InstanceView], forks: list[ForkView]) -> Tree:
    """Who reads (or read) from whom, as a tree; instances nobody gave to are its roots."""
    parents: dict[str, str] = {}
    for fork in sorted(forks, key=lambda fork: -fork.age_s):
        if fork.plan:
            parents[fork.instance_id] = max(fork.plan, key=lambda route: ranges.count(route[1]))[0]
    known = {view.report.instance_id: view for view in instances}
    tree = Tree("instances")
    nodes: dict[str, Tree] = {}

    def node(instance_id: str, above: frozenset[str]) -> Tree:
        if instance_id not in nodes:
            parent = parents.get(instance_id)
            attached = parent in known and parent not in above and parent is not None
            root = node(parent, above | {instance_id}) if attached and parent is not None else tree
            nodes[instance_id] = root.add(_line(known[instance_id]))
        return nodes[instance_id]

    for instance_id in known:
        node(instance_id, frozenset())
    return tree


def _line(view: InstanceView) -> str:
    report = view.report
    share = ranges.count(report.verified) / report.chunk_count if report.chunk_count else 1.0
    word = {"serving": "seed", "loading": "relay", "draining": "draining"}[report.state]
    colour = {"serving": "green", "loading": "cyan", "draining": "yellow"}[report.state]
    trouble = f" [red]quarantined: {escaped(view.quarantined)}[/]" if view.quarantined else ""
    return (
        f"[{colour}]{word}[/] {report.instance_id[:8]} {escaped(report.model)} "
        f"on {escaped(report.placement.host)} {share:.0%} verified, {len(report.readers)} readers{trouble}"
    )
