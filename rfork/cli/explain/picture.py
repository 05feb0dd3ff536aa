"""An account and its verdict, drawn for a terminal of any width."""

from __future__ import annotations

from typing import Final

from rich.console import ConsoleRenderable, Group
from rich.text import Text

from rfork.cli import fleet, units
from rfork.cli.explain.account import Account
from rfork.cli.explain.verdict import Verdict, comparison
from rfork.cli.explain.version import VersionAccount
from rfork.cli.tables import Cell, Column, Fitting

BAR: Final = 20
MEANINGS: Final = {
    "capture": "the target looked at its own tensors",
    "offer": "opened what it could read by itself",
    "plan": "waited for the planner",
    "transfer": "read and verified",
    "resume": "took what a process that died had left",
    "fallback": "loaded by itself",
    "digest": "sealed what it loaded, to give it",
}
"""What each phase is."""
COLOURS: Final = {"forked": "green", "fallback": "yellow", "failed": "red", "interrupted": "red"}


def picture(
    account: Account, told: Verdict, hosts: dict[str, str], version: VersionAccount | None = None
) -> ConsoleRenderable:
    """All of it, the verdict last; `hosts` are those of instances, as far as they are known."""
    parts: list[ConsoleRenderable] = [_head(account, hosts)]
    parts += [Text(""), _phases(account)]
    if account.given:
        parts += [Text(""), _sources(account, hosts)]
    words = version.words() if version is not None else ""
    parts += [Text(line) for line in ("", *([f"version: {words}"] if words else []), *_facts(account))]
    if account.reasons:
        parts += [Text(""), Text("what went wrong, in order", "dim")]
        parts += [Text(f"{number:>3}. {reason}") for number, reason in enumerate(account.reasons, 1)]
    parts.append(Text(""))
    parts.append(Text.assemble(("why   ", "bold"), told.text))
    if told.advice:
        parts.append(Text.assemble(("to do ", "bold"), told.advice))
    return Group(*parts)


def _head(account: Account, hosts: dict[str, str]) -> Text:
    fork, host = account.fork, hosts.get(account.fork.instance_id)
    where = f" on {host}" if host else ""
    rank = units.rank(fork.rank.key)
    text = Text.assemble(("fork ", "bold"), (fork.fork_id, "bold"), f" of {fork.model}")
    text.append(f" {rank}" if rank != "-" else "")
    text.append(f"\nby {units.short(fork.instance_id)}{where}: ")
    word = fleet.phase_of(fork)
    text.append(word, style=COLOURS.get(word, "cyan"))
    text.append(f", {units.size(fork.image_bytes)}, {units.duration(account.seconds)}")
    if fork.finish is not None:
        text.append(f", ended {units.ago(fleet.ended_s(fork))} ago", style="dim")
    return text


def _phases(account: Account) -> ConsoleRenderable:
    if not account.phases:
        when = "(an old client)" if account.fork.finish is not None else "yet"
        return Text(f"phases: not told {when}", "dim")
    columns = (
        Column("phase"),
        Column("took", right=True),
        Column("", spare=1),
        Column("", least=12, spare=2),
    )
    longest = max(account.phases.values()) or 1.0
    rows: list[tuple[Cell, ...]] = []
    for name, seconds in account.phases.items():
        note = MEANINGS.get(name, "")
        if name == "transfer" and account.bound_s is not None and account.link is not None:
            note += f": at best {units.duration(account.bound_s)}, at {units.rate(account.link)}"
        bar = Text("█" * round(BAR * seconds / longest), "cyan")
        rows.append((name, units.duration(seconds), bar, Text(note, "dim")))
    return Fitting(columns, rows)


def _sources(account: Account, hosts: dict[str, str]) -> Fitting:
    columns = (
        Column("source", least=12),
        Column("gave", right=True),
        Column("share", right=True, spare=2),
        Column("now" if account.fork.finish is None else "at best", right=True, spare=3),
        Column("over"),
        Column("held to", right=True),
        Column("on", least=8, spare=1),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            units.source(each.source),
            units.size(each.nbytes),
            f"{each.share:.0%}",
            units.rate(each.rate) if each.rate else "",
            each.transport or ("storage" if each.from_storage else "not told"),
            "" if each.held is None else Text(units.rate(each.held), "yellow"),
            hosts.get(each.source, ""),
        )
        for each in account.given
    ]
    return Fitting(columns, rows)


def _facts(account: Account) -> list[str]:
    link = units.rate(account.link) if account.link else "not known"
    facts = [f"link: {link} in its best second"] if account.link else [f"link: {link}"]
    if account.replans:
        facts.append(f"planned again: {units.plural(account.replans, 'time')}")
    if account.bytes_repeated:
        facts.append(f"read again: {units.size(account.bytes_repeated)}")
    if account.fork.reason:
        facts.append(f"plan: {account.fork.reason}")
    if account.fork.finish is not None and account.fork.finish.fallback:
        facts.append(f"loaded from: {account.fork.finish.fallback}")
    return [*facts, f"took {beside}"] if (beside := comparison(account)) else facts
