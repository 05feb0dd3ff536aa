"""`rfork doctor`: what this machine has, what rfork will use of it, and what to mend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from rfork import settings as options
from rfork.cli.console import handle_errors, out, print_json, print_renderable
from rfork.cli.options import JsonOption, PlannerOption
from rfork.settings import InstanceSettings, StorageSettings

if TYPE_CHECKING:
    from rfork.diagnostics import CheckResult

COLOUR = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
FINDINGS = ("fail", "warn")
FAILED = 1
NAME = 25
"""Columns of a check's name."""


def doctor(planner: PlannerOption = None, as_json: JsonOption = False) -> None:
    """Check this machine and its settings, and say which transports will be used, and why.

    Exit code 1 if something is wrong; each finding says what to do.
    """
    with handle_errors(as_json=as_json):
        from rfork import diagnostics as transport
        from rfork.diagnostics import storage as storage
        from rfork.transport.selection import explain_selection

        chosen = options.load(InstanceSettings, planner=planner)
        checks = transport.run_checks(chosen) + storage.run_checks(chosen, options.load(StorageSettings))
        choices = explain_selection(chosen)
        if as_json:
            print_json(
                {
                    "ok": all(check.status != "fail" for check in checks),
                    "checks": [asdict(check) for check in checks],
                    "transports": [asdict(choice) for choice in choices],
                }
            )
        else:
            for check in checks:
                _print_check(check)
            _print_summary(checks)
        if any(check.status == "fail" for check in checks):
            raise typer.Exit(FAILED)


def _print_check(check: CheckResult) -> None:
    """One line, folded under its second column where it is long; what to do stands on a line of its own."""
    table = Table.grid(padding=(0, 1))
    for size in (4, NAME):
        table.add_column(width=size)
    table.add_column(overflow="fold")
    colour = COLOUR[check.status]
    detail = Text(check.detail, "dim" if check.status == "skip" else "")
    table.add_row(Text(check.status, colour), Text(check.name), detail)
    if check.fix:
        word = "to do: " if check.status in FINDINGS else "to know: "
        table.add_row("", "", Text.assemble((word, colour), check.fix))
    print_renderable(table)


def _print_summary(checks: Sequence[CheckResult]) -> None:
    wrong, doubtful = ([check for check in checks if check.status == status] for status in FINDINGS)
    if not wrong and not doubtful:
        out.print("\nnothing to mend")
        return
    names = ", ".join(check.name for check in (*wrong, *doubtful))
    out.print(f"\n{len(wrong)} to mend, {len(doubtful)} to look at: {names}", markup=False)
