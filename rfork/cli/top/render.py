"""Draws an overview so that it fits: the most urgent sections first, and as many rows as there is room."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rfork.cli import fleet_queries, format
from rfork.cli.tables import Cell, Column, table
from rfork.cli.top.overview import FinishedFork, Overview, RunningFork, overview
from rfork.cli.top.poller import FleetSample
from rfork.schema import ModelInfo

BAR: Final = 12
MIN_ROWS: Final = 2
"""A section has at least so many rows, if it has as many, before another gets more."""
COLOURS: Final = {"forked": "green", "fallback": "yellow", "failed": "red", "interrupted": "red"}


@dataclass(frozen=True, slots=True)
class Section:
    """A table with what its first heading says of it."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Screen:
    """The picture of one look, as wide and high as the terminal is when it is drawn.

    `height` replaces the terminal's, for output that is no terminal; `url` is the planner's.
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
    """What the planner is and how it stands, on one line; on a second one why it does not answer."""
    clock = time.strftime("%H:%M:%S", time.localtime(sample.at))
    what = f"{format.plural(seen.instances, 'instance')} on {format.plural(seen.hosts, 'host')}"
    forks = f"{format.plural(len(seen.running), 'fork')} under way" + _rate_suffix(seen.bytes_per_s)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("rfork top", "bold").append(f" {clock}  {what}, {forks}")
    line.append(f"{'  q quits' if keys else ''}  {url}", "dim")
    if sample.away_since is None:
        return [line]
    away = f"gone since {format.format_age(now - sample.away_since)}; this was seen at {clock}: {sample.error}"
    return [line, Text(away, style="bold red", no_wrap=True, overflow="ellipsis")]


def sections_of(seen: Overview) -> list[Section]:
    """All sections, the most urgent first."""
    return [
        _running_section(seen.running),
        _problem_section(seen),
        _model_section(seen.models),
        _source_section(seen),
        _finished_section(seen.finished),
        _fallback_section(seen),
    ]


def rows_for(wanted: Sequence[int], available_rows: int) -> list[int]:
    """How many rows each section gets of `available_rows` lines, each with a heading and an empty line above.

    The first ones get `MIN_ROWS` each while there is room; what is left goes around, one row at a time.
    """
    counts = [0] * len(wanted)
    for at, want in enumerate(wanted):
        min_rows = min(want, MIN_ROWS)
        if min_rows and available_rows >= min_rows + 2:
            counts[at] = min_rows
            available_rows -= min_rows + 2
    while available_rows > 0 and (open_ := [at for at, count in enumerate(counts) if 0 < count < wanted[at]]):
        for at in open_[:available_rows]:
            counts[at] += 1
        available_rows -= len(open_[:available_rows])
    return counts


def _running_section(forks: Sequence[RunningFork]) -> Section:
    columns = (
        Column(f"forks under way ({len(forks)})", min_width=15),
        Column("model", min_width=12, priority=3),
        Column("version", min_width=8, priority=5),
        Column("done"),
        Column("rate", right=True),
        Column("left", right=True),
        Column("phase", priority=2),
        Column("from", min_width=15, priority=1),
        Column("held to", right=True, priority=4),
    )
    rows = tuple(
        (
            _instance_cell(fork.instance_id, fork.host),
            _model(fork.model, fork.rank),
            format.version(fork.version),
            bar(fork.share),
            format.rate(fork.bytes_per_s),
            "-" if fork.eta_s is None else format.duration(fork.eta_s),
            fork.phase,
            _sources_cell(fork.sources, fork.transports, fork.source_bytes_per_s) or fork.reason,
            "" if fork.rate_limit is None else Text(format.rate(fork.rate_limit), style="yellow"),
        )
        for fork in forks
    )
    return Section(columns, rows)


def _problem_section(seen: Overview) -> Section:
    columns = (
        Column(f"in trouble ({len(seen.problems)})", min_width=12),
        Column("model", min_width=8, priority=1),
        Column("what", min_width=10),
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
        Column("a fork", right=True, priority=2),
        Column("a load", right=True, priority=3),
        Column("saved", right=True, priority=1),
    )
    ordered = sorted(models, key=lambda row: (-row.forks_running, row.model, row.rank_key, row.version or ""))
    rows = tuple(
        (
            title,
            format.version(row.version),
            format.size(row.image_bytes),
            f"{row.seeds:,}",
            f"{row.relays:,}",
            f"{row.forks_running:,}",
            format.size(row.forked_bytes),
            format.size(row.storage_bytes),
            "" if row.fork_s is None else format.duration(row.fork_s),
            "" if row.storage_s is None else format.duration(row.storage_s),
            format.duration(row.seconds_saved) if row.seconds_saved else "",
        )
        for title, row in zip(fleet_queries.model_titles(ordered), ordered, strict=True)
    )
    return Section(columns, rows)


def _source_section(seen: Overview) -> Section:
    columns = (
        Column(f"givers ({len(seen.sources_serving)})", min_width=12),
        Column("model", min_width=8, priority=1),
        Column("version", min_width=8, priority=4),
        Column("as", priority=2),
        Column("readers", right=True),
        Column("gives", right=True, priority=3),
        Column("held to", right=True),
    )
    words = {"serving": "seed", "loading": "relay", "draining": "draining"}
    rows = tuple(
        (
            _instance_cell(source_row.instance_id, source_row.host),
            _model(source_row.model, source_row.rank),
            format.version(source_row.version),
            words[source_row.state],
            f"{source_row.readers} of {source_row.slots}",
            format.rate(source_row.bytes_per_s) if source_row.bytes_per_s else "",
            "" if source_row.rate_limit is None else Text(format.rate(source_row.rate_limit), style="yellow"),
        )
        for source_row in seen.sources_serving
    )
    return Section(columns, rows)


def _finished_section(forks: Sequence[FinishedFork]) -> Section:
    columns = (
        Column(f"ended ({len(forks)})", min_width=12),
        Column("ago", right=True),
        Column("how"),
        Column("model", min_width=8, priority=3),
        Column("version", min_width=8, priority=4),
        Column("took", right=True),
        Column("rate", right=True, priority=2),
        Column("from, or why", min_width=10, priority=1),
    )
    rows = tuple(
        (
            _instance_cell(fork.instance_id, fork.host),
            format.format_age(fork.ended_s),
            Text(fork.outcome, style=COLOURS[fork.outcome]),
            fork.model,
            format.version(fork.version),
            format.duration(fork.seconds),
            format.rate(fork.bytes_per_s) if fork.bytes_per_s else "-",
            _outcome_cell(fork),
        )
        for fork in forks
    )
    return Section(columns, rows)


def _fallback_section(seen: Overview) -> Section:
    columns = (Column("fallbacks because of", min_width=12), Column("forks", right=True))
    return Section(columns, tuple((why, f"{count:,}") for why, count in seen.fallbacks.items()))


def bar(share: float) -> Text:
    """``██████······  50 %``."""
    filled = round(share * BAR)
    return Text.assemble(("█" * filled, "cyan"), ("·" * (BAR - filled), "dim"), f" {int(share * 100):3d} %")


def _instance_cell(instance_id: str, host: str) -> str:
    return f"{format.short(instance_id)} {host}".rstrip()


def _model(model: str, rank_key: str) -> str:
    rank = format.rank(rank_key)
    return model if rank == "-" else f"{model} {rank}"


def _sources_cell(sources: Iterable[str], transports: Mapping[str, str], rates: Mapping[str, float]) -> str:
    return ", ".join(fleet_queries.format_sources(sources, transports, rates))


def _outcome_cell(fork: FinishedFork) -> Cell:
    if fork.outcome == "forked":
        return _sources_cell(fork.sources, fork.transports, {})
    return Text(fork.reasons[-1] if fork.reasons else "no reason told", style="dim")


def _rate_suffix(bytes_per_s: float) -> str:
    return f" at {format.rate(bytes_per_s)}" if bytes_per_s else ""
