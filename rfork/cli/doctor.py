"""`rfork doctor`: check this machine and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from rfork import settings as options
from rfork.cli.console import handle_errors, out, print_json, print_renderable
from rfork.cli.formatters import plural
from rfork.cli.options import JsonOption, PlannerOption
from rfork.errors import SettingsError
from rfork.settings import InstanceSettings, StorageSettings

if TYPE_CHECKING:
    from rfork.diagnostics import CheckResult

Engine = Literal["vllm", "sglang"]
COLOUR = {"ok": "green", "warn": "yellow", "fail": "red", "off": "dim", "skip": "dim"}
FINDINGS = ("fail", "warn")
FAILED = 1
NAME_WIDTH = 25


def doctor(
    planner: PlannerOption = None,
    engine: Annotated[
        Engine | None, typer.Option(help="check which quantisation methods of this engine can be forked here, instead")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="with --engine: only the methods of this model's folder")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and its settings, and show which transports are used and why.

    Exit code 1 if a check fails. Every failure and warning comes with a fix.
    """
    with handle_errors(as_json=as_json):
        if engine is not None:
            _check_engine(engine, model, as_json=as_json)
            return
        if model is not None:
            raise SettingsError("--model requires --engine", hint="add --engine vllm or --engine sglang")
        from rfork import diagnostics
        from rfork.diagnostics import storage
        from rfork.transport.selection import explain_selection

        chosen = options.load(InstanceSettings, planner=planner)
        checks = diagnostics.run_checks(chosen) + storage.run_checks(chosen, options.load(StorageSettings))
        ok = all(check.status != "fail" for check in checks)
        if as_json:
            transports = [asdict(choice) for choice in explain_selection(chosen)]
            print_json({"ok": ok, "checks": [asdict(check) for check in checks], "transports": transports})
        else:
            for check in checks:
                _print_check(check)
            _print_summary(checks)
        if not ok:
            raise typer.Exit(FAILED)


def _check_engine(engine: Engine, model: Path | None, *, as_json: bool) -> None:
    from rfork.cli import golden_checks

    if model is not None and not (model / "config.json").is_file():
        raise SettingsError(f"--model: there is no config.json in {model}", hint="pass the folder of a model")
    checks = golden_checks.run_checks(engine, str(model) if model is not None else None)
    ok = all(check.status != "fail" for check in checks)
    if as_json:
        print_json({"ok": ok, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            _print_check(check)
    if not ok:
        raise typer.Exit(FAILED)


def _print_check(check: CheckResult) -> None:
    """Print a result: a line, folded within its last column, and another line for the fix or hint."""
    table = Table.grid(padding=(0, 1))
    for size in (4, NAME_WIDTH):
        table.add_column(width=size)
    table.add_column(overflow="fold")
    colour = COLOUR[check.status]
    detail = Text(check.detail, "dim" if check.status in ("off", "skip") else "")
    table.add_row(Text(check.status, colour), Text(check.name), detail)
    if check.fix:
        label = "fix: " if check.status in FINDINGS else "hint: "
        table.add_row("", "", Text.assemble((label, colour), check.fix))
    print_renderable(table)


def _print_summary(checks: Sequence[CheckResult]) -> None:
    failures, warnings = ([check for check in checks if check.status == status] for status in FINDINGS)
    if not failures and not warnings:
        out.print("\nno problems found")
        return
    names = ", ".join(check.name for check in (*failures, *warnings))
    counts = f"{plural(len(failures), 'failure')}, {plural(len(warnings), 'warning')}"
    out.print(f"\n{counts}: {names}")
