"""Draws an overview so that it fits: the most urgent sections first, and as many rows as there is room."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rfork.cli import fleet, units
from rfork.cli.tables import Cell, Column, table
from rfork.cli.top.looking import Look
from rfork.cli.top.overview import EndedFork, GoingFork, Overview, overview
from rfork.wire import ModelView

BAR: Final = 12
LEAST_ROWS: Final = 2
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

    look: Look
    url: str
    now: float
    height: int | None = None
    keys: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, self.height or options.height or console.height
        seen = overview(self.look.fleet)
        head = header(self.look, seen, self.url, self.now, keys=self.keys)
        yield from head
        sections = [section for section in sections_of(seen) if section.rows]
        if not sections:
            yield Text("\nno instance is registered: start one with `rfork seed MODEL_DIR`")
        room = height - len(head)
        for section, count in zip(
            sections, rows_for([len(each.rows) for each in sections], room), strict=True
        ):
            if count:
                yield Text("")
                yield table(section.columns, section.rows[:count], width)


def header(look: Look, seen: Overview, url: str, now: float, *, keys: bool) -> list[Text]:
    """What the planner is and how it stands, on one line; on a second one why it does not answer."""
    clock = time.strftime("%H:%M:%S", time.localtime(look.at))
    what = f"{units.plural(seen.instances, 'instance')} on {units.plural(seen.hosts, 'host')}"
    forks = f"{units.plural(len(seen.going), 'fork')} under way" + _at(seen.bytes_per_s)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("rfork top", "bold").append(f" {clock}  {what}, {forks}")
    line.append(f"{'  q quits' if keys else ''}  {url}", "dim")
    if look.away_since is None:
        return [line]
    away = f"gone since {units.ago(now - look.away_since)}; this was seen at {clock}: {look.error}"
    return [line, Text(away, style="bold red", no_wrap=True, overflow="ellipsis")]


def sections_of(seen: Overview) -> list[Section]:
    """All sections, the most urgent first."""
    return [
        _going(seen.going),
        _troubles(seen),
        _models(seen.models),
        _givers(seen),
        _ended(seen.ended),
        _why(seen),
    ]


def rows_for(wanted: Sequence[int], room: int) -> list[int]:
    """How many rows each section gets of `room` lines, each with a heading and an empty line above.

    The first ones get `LEAST_ROWS` each while there is room; what is left goes around, one row at a time.
    """
    counts = [0] * len(wanted)
    for at, want in enumerate(wanted):
        least = min(want, LEAST_ROWS)
        if least and room >= least + 2:
            counts[at] = least
            room -= least + 2
    while room > 0 and (open_ := [at for at, count in enumerate(counts) if 0 < count < wanted[at]]):
        for at in open_[:room]:
            counts[at] += 1
        room -= len(open_[:room])
    return counts


def _going(forks: Sequence[GoingFork]) -> Section:
    columns = (
        Column(f"forks under way ({len(forks)})", least=15),
        Column("model", least=12, spare=3),
        Column("version", least=8, spare=5),
        Column("done"),
        Column("rate", right=True),
        Column("left", right=True),
        Column("phase", spare=2),
        Column("from", least=15, spare=1),
        Column("held to", right=True, spare=4),
    )
    rows = tuple(
        (
            _where(fork.instance_id, fork.host),
            _model(fork.model, fork.rank),
            units.version(fork.version),
            bar(fork.share),
            units.rate(fork.bytes_per_s),
            "-" if fork.eta_s is None else units.duration(fork.eta_s),
            fork.phase,
            _from(fork.sources, fork.transports, fork.source_bytes_per_s) or fork.reason,
            "" if fork.held is None else Text(units.rate(fork.held), style="yellow"),
        )
        for fork in forks
    )
    return Section(columns, rows)


def _troubles(seen: Overview) -> Section:
    columns = (
        Column(f"in trouble ({len(seen.troubles)})", least=12),
        Column("model", least=8, spare=1),
        Column("what", least=10),
    )
    rows = tuple(
        (_where(each.instance_id, each.host), each.model, Text(each.what, style="yellow"))
        for each in seen.troubles
    )
    return Section(columns, rows)


def _models(models: Sequence[ModelView]) -> Section:
    columns = (
        Column(f"models ({len(models)})", least=12),
        Column("version", least=8, spare=1),
        Column("size", right=True),
        Column("seeds", right=True),
        Column("relays", right=True, spare=6),
        Column("forks", right=True),
        Column("forked", right=True, spare=4),
        Column("storage", right=True, spare=5),
        Column("a fork", right=True, spare=2),
        Column("a load", right=True, spare=3),
        Column("saved", right=True, spare=1),
    )
    ordered = sorted(models, key=lambda row: (-row.forks_running, row.model, row.rank_key, row.version or ""))
    rows = tuple(
        (
            title,
            units.version(row.version),
            units.size(row.image_bytes),
            f"{row.seeds:,}",
            f"{row.relays:,}",
            f"{row.forks_running:,}",
            units.size(row.forked_bytes),
            units.size(row.storage_bytes),
            "" if row.fork_s is None else units.duration(row.fork_s),
            "" if row.storage_s is None else units.duration(row.storage_s),
            units.duration(row.saved_s) if row.saved_s else "",
        )
        for title, row in zip(fleet.titles(ordered), ordered, strict=True)
    )
    return Section(columns, rows)


def _givers(seen: Overview) -> Section:
    columns = (
        Column(f"givers ({len(seen.givers)})", least=12),
        Column("model", least=8, spare=1),
        Column("version", least=8, spare=4),
        Column("as", spare=2),
        Column("readers", right=True),
        Column("gives", right=True, spare=3),
        Column("held to", right=True),
    )
    words = {"serving": "seed", "loading": "relay", "draining": "draining"}
    rows = tuple(
        (
            _where(giver.instance_id, giver.host),
            _model(giver.model, giver.rank),
            units.version(giver.version),
            words[giver.state],
            f"{giver.readers} of {giver.slots}",
            units.rate(giver.bytes_per_s) if giver.bytes_per_s else "",
            "" if giver.held is None else Text(units.rate(giver.held), style="yellow"),
        )
        for giver in seen.givers
    )
    return Section(columns, rows)


def _ended(forks: Sequence[EndedFork]) -> Section:
    columns = (
        Column(f"ended ({len(forks)})", least=12),
        Column("ago", right=True),
        Column("how"),
        Column("model", least=8, spare=3),
        Column("version", least=8, spare=4),
        Column("took", right=True),
        Column("rate", right=True, spare=2),
        Column("from, or why", least=10, spare=1),
    )
    rows = tuple(
        (
            _where(fork.instance_id, fork.host),
            units.ago(fork.ended_s),
            Text(fork.outcome, style=COLOURS[fork.outcome]),
            fork.model,
            units.version(fork.version),
            units.duration(fork.seconds),
            units.rate(fork.bytes_per_s) if fork.bytes_per_s else "-",
            _how(fork),
        )
        for fork in forks
    )
    return Section(columns, rows)


def _why(seen: Overview) -> Section:
    columns = (Column("fallbacks because of", least=12), Column("forks", right=True))
    return Section(columns, tuple((why, f"{count:,}") for why, count in seen.fallbacks.items()))


def bar(share: float) -> Text:
    """``██████······  50 %``."""
    filled = round(share * BAR)
    return Text.assemble(("█" * filled, "cyan"), ("·" * (BAR - filled), "dim"), f" {int(share * 100):3d} %")


def _where(instance_id: str, host: str) -> str:
    return f"{units.short(instance_id)} {host}".rstrip()


def _model(model: str, rank_key: str) -> str:
    rank = units.rank(rank_key)
    return model if rank == "-" else f"{model} {rank}"


def _from(sources: Iterable[str], transports: Mapping[str, str], rates: Mapping[str, float]) -> str:
    return ", ".join(fleet.giver_words(sources, transports, rates))


def _how(fork: EndedFork) -> Cell:
    if fork.outcome == "forked":
        return _from(fork.sources, fork.transports, {})
    return Text(fork.reasons[-1] if fork.reasons else "no reason told", style="dim")


def _at(bytes_per_s: float) -> str:
    return f" at {units.rate(bytes_per_s)}" if bytes_per_s else ""
