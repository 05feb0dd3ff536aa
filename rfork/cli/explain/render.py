"""Renders the statistics and diagnosis of a fork for a terminal of any width."""

from __future__ import annotations

from typing import Final

from rich.console import ConsoleRenderable, Group
from rich.text import Text

from rfork.cli import fleet_queries, formatters
from rfork.cli.explain.diagnosis import Diagnosis, comparison
from rfork.cli.explain.fork_stats import ForkStats
from rfork.cli.explain.version import VersionSummary
from rfork.cli.tables import Cell, Column, FittedTable

BAR: Final = 20
MEANINGS: Final = {
    "capture": "inspected the target's tensors",
    "offer": "opened its own snapshot or checkpoint",
    "plan": "waited for a plan",
    "transfer": "read and verified chunks",
    "resume": "loaded chunks kept by a previous process",
    "fallback": "loaded without peers",
    "digest": "computed digests for serving",
}
"""Description of each phase."""
COLOURS: Final = {"forked": "green", "fallback": "yellow", "failed": "red", "interrupted": "red"}


def render_fork(
    stats: ForkStats, diagnosis: Diagnosis, hosts: dict[str, str], version: VersionSummary | None = None
) -> ConsoleRenderable:
    """Return the complete explanation, the diagnosis last. `hosts`: host by instance id, if known."""
    parts: list[ConsoleRenderable] = [_head(stats, hosts)]
    parts += [Text(""), _phases(stats)]
    if stats.sources:
        parts += [Text(""), _sources(stats, hosts)]
    version_text = version.text() if version is not None else ""
    parts += [Text(line) for line in ("", *([f"version: {version_text}"] if version_text else []), *_facts(stats))]
    if stats.reasons:
        parts += [Text(""), Text("errors, in order", "dim")]
        parts += [Text(f"{number:>3}. {reason}") for number, reason in enumerate(stats.reasons, 1)]
    parts.append(Text(""))
    parts.append(Text.assemble(("cause  ", "bold"), diagnosis.text))
    if diagnosis.advice:
        parts.append(Text.assemble(("advice ", "bold"), diagnosis.advice))
    return Group(*parts)


def _head(stats: ForkStats, hosts: dict[str, str]) -> Text:
    fork, host = stats.fork, hosts.get(stats.fork.instance_id)
    where = f" on {host}" if host else ""
    rank = formatters.rank(fork.rank.key)
    text = Text.assemble(("fork ", "bold"), (fork.fork_id, "bold"), f" of {fork.model}")
    text.append(f" {rank}" if rank != "-" else "")
    text.append(f"\ntarget {formatters.short(fork.instance_id)}{where}: ")
    phase = fleet_queries.phase_of(fork)
    text.append(phase, style=COLOURS.get(phase, "cyan"))
    text.append(f", {formatters.size(fork.image_bytes)}, {formatters.duration(stats.seconds)}")
    if fork.finish is not None:
        text.append(f", finished {formatters.age(fleet_queries.finished_ago_s(fork))} ago", style="dim")
    return text


def _phases(stats: ForkStats) -> ConsoleRenderable:
    if not stats.phases:
        when = "by this rfork version" if stats.fork.finish is not None else "yet"
        return Text(f"phases: not reported {when}", "dim")
    columns = (
        Column("phase"),
        Column("time", right=True),
        Column("", priority=1),
        Column("", min_width=12, priority=2),
    )
    max_s = max(stats.phases.values()) or 1.0
    rows: list[tuple[Cell, ...]] = []
    for name, seconds in stats.phases.items():
        note = MEANINGS.get(name, "")
        if name == "transfer" and stats.min_transfer_s is not None and stats.link is not None:
            note += f": at least {formatters.duration(stats.min_transfer_s)} at {formatters.rate(stats.link)}"
        bar = Text("█" * round(BAR * seconds / max_s), "cyan")
        rows.append((name, formatters.duration(seconds), bar, Text(note, "dim")))
    return FittedTable(columns, rows)


def _sources(stats: ForkStats, hosts: dict[str, str]) -> FittedTable:
    columns = (
        Column("source", min_width=12),
        Column("sent", right=True),
        Column("share", right=True, priority=2),
        Column("rate" if stats.fork.finish is None else "peak rate", right=True, priority=3),
        Column("transport"),
        Column("rate limit", right=True),
        Column("host", min_width=8, priority=1),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            formatters.source(each.source),
            formatters.size(each.nbytes),
            f"{each.share:.0%}",
            formatters.rate(each.rate) if each.rate else "",
            each.transport or ("storage" if each.from_storage else "not reported"),
            "" if each.rate_limit is None else Text(formatters.rate(each.rate_limit), "yellow"),
            hosts.get(each.source, ""),
        )
        for each in stats.sources
    ]
    return FittedTable(columns, rows)


def _facts(stats: ForkStats) -> list[str]:
    facts = [f"link: {formatters.rate(stats.link)} peak" if stats.link else "link: not measured"]
    if stats.replans:
        facts.append(f"replans: {stats.replans:,}")
    if stats.bytes_repeated:
        facts.append(f"read again: {formatters.size(stats.bytes_repeated)}")
    if stats.fork.reason:
        facts.append(f"plan: {stats.fork.reason}")
    if stats.fork.finish is not None and stats.fork.finish.fallback:
        facts.append(f"loaded from: {stats.fork.finish.fallback}")
    return [*facts, f"time: {compared}"] if (compared := comparison(stats)) else facts
