"""The screen of `rfork top`: an overview of the fleet as values, drawn to fit a terminal. Pure functions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rfork.cli import fleet_queries, formatters
from rfork.cli.console import Cell, Column, FittedTable
from rfork.cli.fleet_queries import FleetState
from rfork.schema import ForkInfo, InstanceInfo

BAR: Final = 12
MIN_ROWS: Final = 2
"""Rows of each section, if it has as many, before another section gets more."""


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The latest state; `error`: why the planner is unreachable, since `away_since` (Unix time)."""

    fleet: FleetState
    at: float
    error: str = ""
    away_since: float | None = None


class Overview:
    """A fleet sorted by urgency: oldest running forks first, latest finished forks first, busiest sources first."""

    def __init__(self, fleet: FleetState) -> None:
        self.fleet = fleet
        self.hosts = fleet.hosts
        self.running = fleet_queries.running_forks(fleet.forks)
        self.finished = fleet_queries.finished_forks(fleet.forks)
        self.bytes_per_s = sum(map(fleet_queries.rate_of, self.running))
        self.fallbacks = dict(fleet_queries.fallbacks(self.finished).most_common())
        self.problems = [
            (view, problem) for view in fleet.instances if (problem := fleet_queries.instance_problem(view))
        ]
        self.sources = sorted(
            (view for view in fleet.instances if view.report.state == "serving" or view.report.readers),
            key=lambda view: (-len(view.report.readers), view.report.model, view.report.instance_id),
        )
        self.source_rates: Counter[str] = Counter()
        """Total of the current rates that the readers of each source report, in bytes per second."""
        for fork in self.running:
            self.source_rates.update(fleet_queries.rates_of(fork))

    def host_count(self) -> int:
        """Return the number of hosts."""
        return len(set(self.hosts.values()))

    def to_dict(self) -> dict[str, object]:
        """Return the overview for JSON; models are rows of `/v1/models`."""
        return {
            "instances": len(self.fleet.instances),
            "hosts": self.host_count(),
            "bytes_per_s": self.bytes_per_s,
            "models": [row.model_dump(mode="json") for row in self.fleet.models],
            "running": [
                {
                    **self._fork_to_dict(fork),
                    "rank": fork.rank.key,
                    "phase": fleet_queries.phase_of(fork),
                    "share": fleet_queries.verified_share(fork),
                    "eta_s": fleet_queries.eta_s(fork),
                    "seconds": fork.age_s,
                    "source_bytes_per_s": dict(fleet_queries.rates_of(fork)),
                    "rate_limit": rate_limit_of(fork),
                    "reason": fork.reason,
                }
                for fork in self.running
            ],
            "problems": [{**_instance_to_dict(view), "problem": problem} for view, problem in self.problems],
            "sources": [
                {
                    **_instance_to_dict(view),
                    "rank": view.report.rank.key,
                    "state": view.report.state,
                    "readers": len(view.report.readers),
                    "slots": view.report.max_readers,
                    "bytes_per_s": self.source_rates[view.report.instance_id],
                    "rate_limit": view.report.egress_rate,
                }
                for view in self.sources
            ],
            "finished": [
                {
                    **self._fork_to_dict(fork),
                    "outcome": fork.finish.outcome,
                    "finished_ago_s": fleet_queries.finished_ago_s(fork),
                    "seconds": fork.finish.seconds,
                    "fallback": fork.finish.fallback,
                    "reasons": list(fork.finish.reasons),
                }
                for fork in self.finished
                if fork.finish is not None
            ],
            "fallbacks": self.fallbacks,
        }

    def _fork_to_dict(self, fork: ForkInfo) -> dict[str, object]:
        return {
            "fork_id": fork.fork_id,
            "instance_id": fork.instance_id,
            "host": self.hosts.get(fork.instance_id, ""),
            "model": fork.model,
            "version": fork.version,
            "bytes_per_s": fleet_queries.rate_of(fork),
            "sources": fleet_queries.sources_of(fork),
            "transports": dict(fleet_queries.transports_of(fork)),
        }


def rate_limit_of(fork: ForkInfo) -> int | None:
    """Return the lowest rate limit of a fork's sources in bytes per second; None if none has a limit."""
    return min(fork.source_rate_limits.values(), default=None)


def _instance_to_dict(view: InstanceInfo) -> dict[str, object]:
    report = view.report
    return {
        "instance_id": report.instance_id,
        "host": report.placement.host,
        "model": report.model,
        "version": view.version,
    }


@dataclass(frozen=True, slots=True)
class Screen:
    """The rendered state, as wide and high as the terminal; most urgent sections first.

    `height` overrides the height if there is no terminal; `url` is the planner's.
    """

    sample: FleetSample
    url: str
    now: float
    height: int | None = None
    keys: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen = Overview(self.sample.fleet)
        head = self._header(seen)
        yield from head
        sections = [table for table in sections_of(seen) if table.rows]
        if not sections:
            yield Text("\nno instance is registered: start one with `rfork seed MODEL_DIR`")
        available_rows = (self.height or options.height or console.height) - len(head)
        counts = rows_for([len(table.rows) for table in sections], available_rows)
        for table, count in zip(sections, counts, strict=True):
            if count:
                yield Text("")
                yield FittedTable(table.columns, table.rows[:count])

    def _header(self, seen: Overview) -> list[Text]:
        """Return a line with the state of the planner, and a second one with the error if it is unreachable."""
        sample, clock = self.sample, time.strftime("%H:%M:%S", time.localtime(self.sample.at))
        instances = formatters.plural(len(seen.fleet.instances), "instance")
        rate = f" at {formatters.rate(seen.bytes_per_s)}" if seen.bytes_per_s else ""
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append("rfork top", "bold").append(f" {clock}  {instances} on ")
        line.append(f"{formatters.plural(seen.host_count(), 'host')}, ")
        line.append(f"{formatters.plural(len(seen.running), 'running fork')}{rate}")
        line.append(f"{'  q quits' if self.keys else ''}  {self.url}", "dim")
        if sample.away_since is None:
            return [line]
        away = formatters.age(self.now - sample.away_since)
        warning = f"planner unreachable for {away}, last state at {clock}: {sample.error}"
        return [line, Text(warning, style="bold red", no_wrap=True, overflow="ellipsis")]


def sections_of(seen: Overview) -> list[FittedTable]:
    """Return all sections, most urgent first; the first column heading of a section is its title."""
    models = sorted(seen.fleet.models, key=lambda row: (-row.forks_running, row.model, row.rank_key, row.version or ""))
    return [
        _running_section(seen),
        _problem_section(seen),
        fleet_queries.model_table(models, f"models ({len(models)})"),
        _source_section(seen),
        _finished_section(seen),
        FittedTable(
            (Column("fallback reasons", min_width=12), Column("forks", right=True)),
            [(reason, f"{count:,}") for reason, count in seen.fallbacks.items()],
        ),
    ]


def rows_for(requested_rows: Sequence[int], available_rows: int) -> list[int]:
    """Distribute `available_rows` lines over the sections; each section also needs two lines for its heading.

    Each section first gets `MIN_ROWS`, in order; remaining lines are distributed one row at a time.
    """
    counts = [0] * len(requested_rows)
    for at, requested in enumerate(requested_rows):
        min_rows = min(requested, MIN_ROWS)
        if min_rows and available_rows >= min_rows + 2:
            counts[at] = min_rows
            available_rows -= min_rows + 2
    while available_rows > 0 and (
        growable := [at for at, count in enumerate(counts) if 0 < count < requested_rows[at]][:available_rows]
    ):
        for at in growable:
            counts[at] += 1
        available_rows -= len(growable)
    return counts


def _running_section(seen: Overview) -> FittedTable:
    columns = (
        Column(f"running forks ({len(seen.running)})", min_width=15),
        Column("model", min_width=12, priority=3),
        Column("version", min_width=8, priority=5),
        Column("done"),
        Column("rate", right=True),
        Column("left", right=True),
        Column("phase", priority=2),
        Column("sources", min_width=15, priority=1),
        Column("rate limit", right=True, priority=4),
    )
    rows = []
    for fork in seen.running:
        left_s = fleet_queries.eta_s(fork)
        rows.append(
            (
                _instance_cell(fork.instance_id, seen),
                formatters.model(fork.model, fork.rank.key),
                formatters.version(fork.version),
                bar(fleet_queries.verified_share(fork)),
                formatters.rate(fleet_queries.rate_of(fork)),
                "-" if left_s is None else formatters.duration(left_s),
                fleet_queries.phase_of(fork),
                fleet_queries.sources_text(fork) or fork.reason,
                _limit_cell(rate_limit_of(fork)),
            )
        )
    return FittedTable(columns, rows)


def _problem_section(seen: Overview) -> FittedTable:
    columns = (
        Column(f"problems ({len(seen.problems)})", min_width=12),
        Column("model", min_width=8, priority=1),
        Column("problem", min_width=10),
    )
    rows = [
        (_instance_cell(view.report.instance_id, seen), view.report.model, Text(problem, style="yellow"))
        for view, problem in seen.problems
    ]
    return FittedTable(columns, rows)


def _source_section(seen: Overview) -> FittedTable:
    columns = (
        Column(f"sources ({len(seen.sources)})", min_width=12),
        Column("model", min_width=8, priority=1),
        Column("version", min_width=8, priority=4),
        Column("role", priority=2),
        Column("readers", right=True),
        Column("rate", right=True, priority=3),
        Column("rate limit", right=True),
    )
    rows = []
    for view in seen.sources:
        report, rate = view.report, seen.source_rates[view.report.instance_id]
        rows.append(
            (
                _instance_cell(report.instance_id, seen),
                formatters.model(report.model, report.rank.key),
                formatters.version(view.version),
                fleet_queries.role_of(view)[0],
                f"{len(report.readers)} of {report.max_readers}",
                formatters.rate(rate) if rate else "",
                _limit_cell(report.egress_rate),
            )
        )
    return FittedTable(columns, rows)


def _finished_section(seen: Overview) -> FittedTable:
    columns = (
        Column(f"finished forks ({len(seen.finished)})", min_width=12),
        Column("ago", right=True),
        Column("outcome"),
        Column("model", min_width=8, priority=3),
        Column("version", min_width=8, priority=4),
        Column("time", right=True),
        Column("rate", right=True, priority=2),
        Column("sources or error", min_width=10, priority=1),
    )
    rows: list[tuple[Cell, ...]] = []
    for fork in seen.finished:
        rate, forked = fleet_queries.rate_of(fork), fleet_queries.phase_of(fork) == "forked"
        error = fleet_queries.last_error(fork) or "no reason reported"
        rows.append(
            (
                _instance_cell(fork.instance_id, seen),
                formatters.age(fleet_queries.finished_ago_s(fork)),
                fleet_queries.phase_text(fork),
                fork.model,
                formatters.version(fork.version),
                formatters.duration(fork.finish.seconds if fork.finish is not None else fork.age_s),
                formatters.rate(rate) if rate else "-",
                fleet_queries.sources_text(fork) if forked else Text(error, style="dim"),
            )
        )
    return FittedTable(columns, rows)


def bar(share: float) -> Text:
    """Return a progress bar: ``██████······  50 %``."""
    filled = round(share * BAR)
    return Text.assemble(("█" * filled, "cyan"), ("·" * (BAR - filled), "dim"), f" {int(share * 100):3d} %")


def _instance_cell(instance_id: str, seen: Overview) -> str:
    return f"{formatters.short(instance_id)} {seen.hosts.get(instance_id, '')}".rstrip()


def _limit_cell(rate_limit: int | None) -> Cell:
    return "" if rate_limit is None else Text(formatters.rate(rate_limit), style="yellow")
