"""Renders an overview to fit the screen: most urgent sections first."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rfork.cli import fleet_queries, formatters
from rfork.cli.tables import Cell, Column, table
from rfork.cli.top.overview import FinishedFork, Overview, RunningFork, overview
from rfork.cli.top.poller import FleetSample
from rfork.schema import ModelInfo

BAR: Final = 12
MIN_ROWS: Final = 2
"""Rows of each section, if it has as many, before another section gets more."""
COLOURS: Final = {"forked": "green", "fallback": "yellow", "failed": "red", "interrupted": "red"}


@dataclass(frozen=True, slots=True)
class Section:
    """A table whose first column heading is its title."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Screen:
    """The rendered state, as wide and high as the terminal.

    `height` overrides the height if there is no terminal; `url` is the planner's.
    """

    sample: FleetSample
    url: str
    now: float
    height: int | None = None
    keys: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, self.height or options.height or console.height
        seen = overview(self.sample.fleet)
        head = header(self.sample, seen, self.url, self.now, keys=self.keys)
        yield from head
        sections = [section for section in sections_of(seen) if section.rows]
        if not sections:
            yield Text("\nno instance is registered: start one with `rfork seed MODEL_DIR`")
        available_rows = height - len(head)
        for section, count in zip(
            sections, rows_for([len(each.rows) for each in sections], available_rows), strict=True
        ):
            if count:
                yield Text("")
                yield table(section.columns, section.rows[:count], width)


def header(sample: FleetSample, seen: Overview, url: str, now: float, *, keys: bool) -> list[Text]:
    """Return a line with the state of the planner, and a second one with the error if it is unreachable."""
    clock = time.strftime("%H:%M:%S", time.localtime(sample.at))
    instances = f"{formatters.plural(seen.instances, 'instance')} on {formatters.plural(seen.hosts, 'host')}"
    forks = formatters.plural(len(seen.running), "running fork") + _rate_suffix(seen.bytes_per_s)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("rfork top", "bold").append(f" {clock}  {instances}, {forks}")
    line.append(f"{'  q quits' if keys else ''}  {url}", "dim")
    if sample.away_since is None:
        return [line]
    warning = (
        f"planner unreachable for {formatters.age(now - sample.away_since)}, last state at {clock}: {sample.error}"
    )
    return [line, Text(warning, style="bold red", no_wrap=True, overflow="ellipsis")]


def sections_of(seen: Overview) -> list[Section]:
    """Return all sections, most urgent first."""
    return [
        _running_section(seen.running),
        _problem_section(seen),
        _model_section(seen.models),
        _source_section(seen),
        _finished_section(seen.finished),
        _fallback_section(seen),
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


def _running_section(forks: Sequence[RunningFork]) -> Section:
    columns = (
        Column(f"running forks ({len(forks)})", min_width=15),
        Column("model", min_width=12, priority=3),
        Column("version", min_width=8, priority=5),
        Column("done"),
        Column("rate", right=True),
        Column("left", right=True),
        Column("phase", priority=2),
        Column("sources", min_width=15, priority=1),
        Column("rate limit", right=True, priority=4),
    )
    rows = tuple(
        (
            _instance_cell(fork.instance_id, fork.host),
            _model(fork.model, fork.rank),
            formatters.version(fork.version),
            bar(fork.share),
            formatters.rate(fork.bytes_per_s),
            "-" if fork.eta_s is None else formatters.duration(fork.eta_s),
            fork.phase,
            _sources_cell(fork.sources, fork.transports, fork.source_bytes_per_s) or fork.reason,
            "" if fork.rate_limit is None else Text(formatters.rate(fork.rate_limit), style="yellow"),
        )
        for fork in forks
    )
    return Section(columns, rows)


def _problem_section(seen: Overview) -> Section:
    columns = (
        Column(f"problems ({len(seen.problems)})", min_width=12),
        Column("model", min_width=8, priority=1),
        Column("problem", min_width=10),
    )
    rows = tuple(
        (_instance_cell(each.instance_id, each.host), each.model, Text(each.problem, style="yellow"))
        for each in seen.problems
    )
    return Section(columns, rows)


def _model_section(models: Sequence[ModelInfo]) -> Section:
    columns = (
        Column(f"models ({len(models)})", min_width=12),
        Column("version", min_width=8, priority=1),
        Column("size", right=True),
        Column("seeds", right=True),
        Column("relays", right=True, priority=6),
        Column("forks", right=True),
        Column("forked", right=True, priority=4),
        Column("storage", right=True, priority=5),
        Column("median fork", right=True, priority=2),
        Column("median load", right=True, priority=3),
        Column("saved", right=True, priority=1),
    )
    ordered = sorted(models, key=lambda row: (-row.forks_running, row.model, row.rank_key, row.version or ""))
    rows = tuple(
        (
            title,
            formatters.version(row.version),
            formatters.size(row.image_bytes),
            f"{row.seeds:,}",
            f"{row.relays:,}",
            f"{row.forks_running:,}",
            formatters.size(row.forked_bytes),
            formatters.size(row.storage_bytes),
            "" if row.fork_s is None else formatters.duration(row.fork_s),
            "" if row.storage_s is None else formatters.duration(row.storage_s),
            formatters.duration(row.seconds_saved) if row.seconds_saved else "",
        )
        for title, row in zip(fleet_queries.model_titles(ordered), ordered, strict=True)
    )
    return Section(columns, rows)


def _source_section(seen: Overview) -> Section:
    columns = (
        Column(f"sources ({len(seen.sources)})", min_width=12),
        Column("model", min_width=8, priority=1),
        Column("version", min_width=8, priority=4),
        Column("role", priority=2),
        Column("readers", right=True),
        Column("rate", right=True, priority=3),
        Column("rate limit", right=True),
    )
    roles = {"serving": "seed", "loading": "relay", "draining": "draining"}
    rows = tuple(
        (
            _instance_cell(source_row.instance_id, source_row.host),
            _model(source_row.model, source_row.rank),
            formatters.version(source_row.version),
            roles[source_row.state],
            f"{source_row.readers} of {source_row.slots}",
            formatters.rate(source_row.bytes_per_s) if source_row.bytes_per_s else "",
            "" if source_row.rate_limit is None else Text(formatters.rate(source_row.rate_limit), style="yellow"),
        )
        for source_row in seen.sources
    )
    return Section(columns, rows)


def _finished_section(forks: Sequence[FinishedFork]) -> Section:
    columns = (
        Column(f"finished forks ({len(forks)})", min_width=12),
        Column("ago", right=True),
        Column("outcome"),
        Column("model", min_width=8, priority=3),
        Column("version", min_width=8, priority=4),
        Column("time", right=True),
        Column("rate", right=True, priority=2),
        Column("sources or error", min_width=10, priority=1),
    )
    rows = tuple(
        (
            _instance_cell(fork.instance_id, fork.host),
            formatters.age(fork.finished_ago_s),
            Text(fork.outcome, style=COLOURS[fork.outcome]),
            fork.model,
            formatters.version(fork.version),
            formatters.duration(fork.seconds),
            formatters.rate(fork.bytes_per_s) if fork.bytes_per_s else "-",
            _outcome_cell(fork),
        )
        for fork in forks
    )
    return Section(columns, rows)


def _fallback_section(seen: Overview) -> Section:
    columns = (Column("fallback reasons", min_width=12), Column("forks", right=True))
    return Section(columns, tuple((reason, f"{count:,}") for reason, count in seen.fallbacks.items()))


def bar(share: float) -> Text:
    """Return a progress bar: ``██████······  50 %``."""
    filled = round(share * BAR)
    return Text.assemble(("█" * filled, "cyan"), ("·" * (BAR - filled), "dim"), f" {int(share * 100):3d} %")


def _instance_cell(instance_id: str, host: str) -> str:
    return f"{formatters.short(instance_id)} {host}".rstrip()


def _model(model: str, rank_key: str) -> str:
    rank = formatters.rank(rank_key)
    return model if rank == "-" else f"{model} {rank}"


def _sources_cell(sources: Iterable[str], transports: Mapping[str, str], rates: Mapping[str, float]) -> str:
    return ", ".join(fleet_queries.format_sources(sources, transports, rates))


def _outcome_cell(fork: FinishedFork) -> Cell:
    if fork.outcome == "forked":
        return _sources_cell(fork.sources, fork.transports, {})
    return Text(fork.reasons[-1] if fork.reasons else "no reason reported", style="dim")


def _rate_suffix(bytes_per_s: float) -> str:
    return f" at {formatters.rate(bytes_per_s)}" if bytes_per_s else ""
