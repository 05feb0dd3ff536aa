"""`rfork forks`: the forks that the planner knows, newest first, or each change as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Annotated, Final

import typer
from rich.text import Text

from rfork import settings as options
from rfork.cli import fleet, units
from rfork.cli.completion import complete_model
from rfork.cli.console import err, out, print_json, reported, show
from rfork.cli.options import JsonOption, PlannerOption
from rfork.cli.tables import Cell, Column, Fitting
from rfork.control.client import PlannerClient
from rfork.errors import PlannerRefused, PlannerUnreachable
from rfork.fields import ForkState
from rfork.settings import Settings
from rfork.wire import ForkEvent, ForkView

SHOWN: Final = 20
BACK_S: Final = 2.0
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
            help=f"Most forks to list ({SHOWN}); with --follow, end after so many changes.",
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
    with reported(as_json=as_json):
        with PlannerClient.of(options.load(Settings, planner=planner)) as client:
            if follow:
                _follow(client, model, state, limit, as_json=as_json)
                return
            found = sorted(client.forks(model=model, state=state), key=lambda fork: fork.age_s)
        listed = found[: limit or SHOWN]
        if as_json:
            print_json({"forks": [fork.model_dump(mode="json") for fork in listed], "known": len(found)})
            return
        if not found:
            which = f" {state}" if state else ""
            err.print(f"no{which} fork{f' of {model}' if model else ''} is known", markup=False)
            return
        show(fork_table(listed))
        if len(found) > len(listed):
            err.print(f"{len(found) - len(listed):,} older ones: --limit {len(found)} lists them too")


def fork_table(listed: list[ForkView]) -> Fitting:
    """One row a fork."""
    columns = (
        Column("fork"),
        Column("asked", right=True, spare=4),
        Column("how"),
        Column("model", least=8, spare=1),
        Column("version", least=8, spare=3),
        Column("size", right=True, spare=6),
        Column("took", right=True),
        Column("rate", right=True, spare=5),
        Column("from", least=8, spare=2),
        Column("last trouble", least=8, spare=7),
    )
    return Fitting(columns, [_row(fork) for fork in listed])


def _row(fork: ForkView) -> tuple[Cell, ...]:
    word, speed = fleet.phase_of(fork), fleet.rate_of(fork)
    so_far = "" if fork.finish is not None else f" {fleet.verified_share(fork):.0%}"
    return (
        fork.fork_id[:12],
        f"{units.ago(fork.age_s)} ago",
        Text(f"{word}{so_far}", COLOURS.get(word, "cyan")),
        _model(fork),
        units.version(fork.version),
        units.size(fork.image_bytes),
        units.duration(fork.finish.seconds if fork.finish is not None else fork.age_s),
        units.rate(speed) if speed else "-",
        source_words(fork),
        _trouble(fork),
    )


def source_words(fork: ForkView) -> str:
    """Who gives, most first: ``1f3a9c2e (http), snapshot:s3://…``; of several that give now, how much."""
    rates = fleet.rates_of(fork) if fork.finish is None else {}
    return ", ".join(fleet.giver_words(fleet.sources_of(fork), fleet.transports_of(fork), rates)) or "-"


def _model(fork: ForkView) -> str:
    rank = units.rank(fork.rank.key)
    return fork.model if rank == "-" else f"{fork.model} {rank}"


def _trouble(fork: ForkView) -> str:
    if fork.finish is None or not fork.finish.reasons:
        return ""
    return fork.finish.reasons[-1]


def _follow(
    client: PlannerClient, model: str | None, state: str | None, limit: int | None, *, as_json: bool
) -> None:
    told = 0
    for event in _events(client, model):
        if state not in (None, event.fork.state):
            continue
        if as_json:
            print_json(event.model_dump(mode="json"))
        else:
            out.print(f"{time.strftime('%H:%M:%S')} {event_line(event)}", markup=False)
        told += 1
        if told == limit:
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
        except (PlannerUnreachable, PlannerRefused) as error:
            if not answered or (isinstance(error, PlannerRefused) and error.status < 500):
                raise
            why = str(error)
        err.print(f"{why}; asking again", markup=False)
        pause(BACK_S)


def event_line(event: ForkEvent) -> str:
    """One change on one line."""
    fork = event.fork
    model = " ".join(filter(None, (_model(fork), units.version(fork.version))))
    name = f"{fork.fork_id[:12]} {model} on {units.short(fork.instance_id)}"
    if fork.finish is not None:
        seconds = units.duration(fork.finish.seconds)
        at = f", {units.rate(fleet.rate_of(fork))}" if fleet.rate_of(fork) else ""
        line = f"{name}: {fork.finish.outcome} in {seconds}{at}"
        if fork.finish.fallback:
            line += f", {fork.finish.fallback}"
        trouble = _trouble(fork)
        return f"{line}, because of {trouble}" if trouble else f"{line}, from {source_words(fork)}"
    if event.kind == "planned":
        return f"{name}: {'planned' if fork.plan else 'waits'}, {fork.reason or source_words(fork)}"
    left_s = fleet.eta_s(fork)
    left = f", {units.duration(left_s)} left" if left_s is not None else ""
    share, speed = fleet.verified_share(fork), units.rate(fleet.rate_of(fork))
    return f"{name}: {fleet.phase_of(fork)} {share:.0%}, {speed}{left}, from {source_words(fork)}"
