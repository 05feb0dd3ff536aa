"""Output of `rfork status --forks`: a table of forks, or each change as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from rich.text import Text

from rfork.cli import fleet_queries, formatters
from rfork.cli.console import err, out, print_json, print_renderable
from rfork.cli.tables import Cell, Column, FittedTable
from rfork.errors import PlannerRejected, PlannerUnreachable
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkEvent, ForkInfo
from rfork.schema.types import ForkState

DEFAULT_LIMIT: Final = 20
RECONNECT_S: Final = 2.0
"""Pause before reconnecting to a planner that became unreachable."""
COLOURS: Final = {
    "forked": "green", "fallback": "yellow", "failed": "red", "interrupted": "red", "planning": "dim",
}  # fmt: skip


def list_forks(
    client: PlannerClient, model: str | None, state: ForkState | None, limit: int | None, *, as_json: bool
) -> None:
    """Print forks, newest first, at most `limit` (default: `DEFAULT_LIMIT`)."""
    found = sorted(client.forks(model=model, state=state), key=lambda fork: fork.age_s)
    listed = found[: limit or DEFAULT_LIMIT]
    if as_json:
        print_json({"forks": [fork.model_dump(mode="json") for fork in listed], "total": len(found)})
        return
    if not found:
        which = f"{state} " if state else ""
        err.print(f"no {which}forks{f' of {model}' if model else ''}", markup=False)
        return
    print_renderable(fork_table(listed))
    if len(found) > len(listed):
        err.print(f"{len(found) - len(listed):,} older forks not shown; use --limit {len(found)} to list all")


def follow_forks(
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
            out.print(f"{time.strftime('%H:%M:%S')} {event_line(event)}", markup=False)
        printed += 1
        if printed == limit:
            return


def fork_table(listed: list[ForkInfo]) -> FittedTable:
    """Return a table with one row per fork."""
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
    return FittedTable(columns, [_row(fork) for fork in listed])


def _row(fork: ForkInfo) -> tuple[Cell, ...]:
    phase, speed = fleet_queries.phase_of(fork), fleet_queries.rate_of(fork)
    share = "" if fork.finish is not None else f" {fleet_queries.verified_share(fork):.0%}"
    return (
        fork.fork_id[:12],
        f"{formatters.age(fork.age_s)} ago",
        Text(f"{phase}{share}", COLOURS.get(phase, "cyan")),
        _model(fork),
        formatters.version(fork.version),
        formatters.size(fork.image_bytes),
        formatters.duration(fork.finish.seconds if fork.finish is not None else fork.age_s),
        formatters.rate(speed) if speed else "-",
        sources_text(fork),
        _failure_reason(fork),
    )


def sources_text(fork: ForkInfo) -> str:
    """Return the sources of a fork, largest first: ``1f3a9c2e (http), snapshot:s3://…``.

    For a running fork with several sources, each has its current rate.
    """
    rates = fleet_queries.rates_of(fork) if fork.finish is None else {}
    return (
        ", ".join(
            fleet_queries.format_sources(fleet_queries.sources_of(fork), fleet_queries.transports_of(fork), rates)
        )
        or "-"
    )


def _model(fork: ForkInfo) -> str:
    rank = formatters.rank(fork.rank.key)
    return fork.model if rank == "-" else f"{fork.model} {rank}"


def _failure_reason(fork: ForkInfo) -> str:
    if fork.finish is None or not fork.finish.reasons:
        return ""
    return fork.finish.reasons[-1]


def _events(
    client: PlannerClient, model: str | None, pause: Callable[[float], None] = time.sleep
) -> Iterator[ForkEvent]:
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
        err.print(f"{reason}; reconnecting", markup=False)
        pause(RECONNECT_S)


def event_line(event: ForkEvent) -> str:
    """Return a change of a fork as one line."""
    fork = event.fork
    model = " ".join(filter(None, (_model(fork), formatters.version(fork.version))))
    name = f"{fork.fork_id[:12]} {model} on {formatters.short(fork.instance_id)}"
    if fork.finish is not None:
        seconds = formatters.duration(fork.finish.seconds)
        at = f", {formatters.rate(fleet_queries.rate_of(fork))}" if fleet_queries.rate_of(fork) else ""
        line = f"{name}: {fork.finish.outcome} in {seconds}{at}"
        if fork.finish.fallback:
            line += f", {fork.finish.fallback}"
        failure_reason = _failure_reason(fork)
        return f"{line}, {failure_reason}" if failure_reason else f"{line}, from {sources_text(fork)}"
    if event.kind == "planned":
        return f"{name}: {'planned' if fork.plan else 'waiting'}, {fork.reason or sources_text(fork)}"
    left_s = fleet_queries.eta_s(fork)
    left = f", {formatters.duration(left_s)} left" if left_s is not None else ""
    share, speed = fleet_queries.verified_share(fork), formatters.rate(fleet_queries.rate_of(fork))
    return f"{name}: {fleet_queries.phase_of(fork)} {share:.0%}, {speed}{left}, from {sources_text(fork)}"
