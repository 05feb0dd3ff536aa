"""`rfork forks`: the forks that the planner knows, newest first, or each change as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Annotated, Final

import typer
from rich.text import Text

from rfork import settings as options
from rfork.cli import fleet_queries, format
from rfork.cli.completion import complete_model
from rfork.cli.console import err, handle_errors, out, print_json, print_renderable
from rfork.cli.options import JsonOption, PlannerOption
from rfork.cli.tables import Cell, Column, FittedTable
from rfork.errors import PlannerRejected, PlannerUnreachable
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkEvent, ForkInfo
from rfork.schema.types import ForkState
from rfork.settings import InstanceSettings

DEFAULT_LIMIT: Final = 20
RECONNECT_S: Final = 2.0
"""How long it waits before it asks a planner again that went away."""
COLOURS: Final = {
    "forked": "green", "fallback": "yellow", "failed": "red", "interrupted": "red", "planning": "dim",
}  # fmt: skip


def forks(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Only of this model.", autocompletion=complete_model),
    ] = None,
    state: Annotated[ForkState | None, typer.Option("--state", help="Only in this state.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            metavar="N",
            help=f"Most forks to list ({DEFAULT_LIMIT}); with --follow, end after so many changes.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print each change as it happens, until interrupted.")
    ] = False,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List forks, newest first, or follow them. `rfork explain FORK` says more of one."""
    with handle_errors(as_json=as_json):
        with PlannerClient.of(options.load(InstanceSettings, planner=planner)) as client:
            if follow:
                _follow(client, model, state, limit, as_json=as_json)
                return
            found = sorted(client.forks(model=model, state=state), key=lambda fork: fork.age_s)
        listed = found[: limit or DEFAULT_LIMIT]
        if as_json:
            print_json({"forks": [fork.model_dump(mode="json") for fork in listed], "known": len(found)})
            return
        if not found:
            which = f" {state}" if state else ""
            err.print(f"no{which} fork{f' of {model}' if model else ''} is known", markup=False)
            return
        print_renderable(fork_table(listed))
        if len(found) > len(listed):
            err.print(f"{len(found) - len(listed):,} older ones: --limit {len(found)} lists them too")


def fork_table(listed: list[ForkInfo]) -> FittedTable:
    """One row a fork."""
    columns = (
        Column("fork"),
        Column("asked", right=True, priority=4),
        Column("how"),
        Column("model", min_width=8, priority=1),
        Column("version", min_width=8, priority=3),
        Column("size", right=True, priority=6),
        Column("took", right=True),
        Column("rate", right=True, priority=5),
        Column("from", min_width=8, priority=2),
        Column("last trouble", min_width=8, priority=7),
    )
    return FittedTable(columns, [_row(fork) for fork in listed])


def _row(fork: ForkInfo) -> tuple[Cell, ...]:
    word, speed = fleet_queries.phase_of(fork), fleet_queries.rate_of(fork)
    so_far = "" if fork.finish is not None else f" {fleet_queries.verified_share(fork):.0%}"
    return (
        fork.fork_id[:12],
        f"{format.format_age(fork.age_s)} ago",
        Text(f"{word}{so_far}", COLOURS.get(word, "cyan")),
        _model(fork),
        format.version(fork.version),
        format.size(fork.image_bytes),
        format.duration(fork.finish.seconds if fork.finish is not None else fork.age_s),
        format.rate(speed) if speed else "-",
        source_words(fork),
        _failure_reason(fork),
    )


def source_words(fork: ForkInfo) -> str:
    """Who gives, most first: ``1f3a9c2e (http), snapshot:s3://…``; of several that give now, how much."""
    rates = fleet_queries.rates_of(fork) if fork.finish is None else {}
    return (
        ", ".join(
            fleet_queries.format_sources(fleet_queries.sources_of(fork), fleet_queries.transports_of(fork), rates)
        )
        or "-"
    )


def _model(fork: ForkInfo) -> str:
    rank = format.rank(fork.rank.key)
    return fork.model if rank == "-" else f"{fork.model} {rank}"


def _failure_reason(fork: ForkInfo) -> str:
    if fork.finish is None or not fork.finish.reasons:
        return ""
    return fork.finish.reasons[-1]


def _follow(client: PlannerClient, model: str | None, state: str | None, limit: int | None, *, as_json: bool) -> None:
    printed = 0
    for event in _events(client, model):
        if state not in (None, event.fork.state):
            continue
        if as_json:
            print_json(event.model_dump(mode="json"))
        else:
            out.print(f"{time.strftime('%H:%M:%S')} {event_line(event)}", markup=False)
        printed += 1
        if printed == limit:
            return


def _events(
    client: PlannerClient, model: str | None, pause: Callable[[float], None] = time.sleep
) -> Iterator[ForkEvent]:
    """Changes of forks without an end, over restarts of the planner, but not over a first call that fails."""
    answered = False
    while True:
        try:
            with client.events(model=model) as stream:
                if answered:
                    err.print(f"{client.url} answers again")
                answered = True
                yield from stream
            why = f"{client.url} ended the stream"
        except (PlannerUnreachable, PlannerRejected) as error:
            if not answered or (isinstance(error, PlannerRejected) and error.status < 500):
                raise
            why = str(error)
        err.print(f"{why}; asking again", markup=False)
        pause(RECONNECT_S)


def event_line(event: ForkEvent) -> str:
    """One change on one line."""
    fork = event.fork
    model = " ".join(filter(None, (_model(fork), format.version(fork.version))))
    name = f"{fork.fork_id[:12]} {model} on {format.short(fork.instance_id)}"
    if fork.finish is not None:
        seconds = format.duration(fork.finish.seconds)
        at = f", {format.rate(fleet_queries.rate_of(fork))}" if fleet_queries.rate_of(fork) else ""
        line = f"{name}: {fork.finish.outcome} in {seconds}{at}"
        if fork.finish.fallback:
            line += f", {fork.finish.fallback}"
        failure_reason = _failure_reason(fork)
        return f"{line}, because of {failure_reason}" if failure_reason else f"{line}, from {source_words(fork)}"
    if event.kind == "planned":
        return f"{name}: {'planned' if fork.plan else 'waits'}, {fork.reason or source_words(fork)}"
    left_s = fleet_queries.eta_s(fork)
    left = f", {format.duration(left_s)} left" if left_s is not None else ""
    share, speed = fleet_queries.verified_share(fork), format.rate(fleet_queries.rate_of(fork))
    return f"{name}: {fleet_queries.phase_of(fork)} {share:.0%}, {speed}{left}, from {source_words(fork)}"
