"""`rfork doctor`: what this machine has, what rfork will use of it, and what to mend."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.table import Table

from rfork import settings as options
from rfork.cli.console import escaped, out, print_json, reported
from rfork.cli.options import JsonOption, PlannerOption
from rfork.settings import Settings, StorageSettings

COLOUR = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
FAILED = 1


def doctor(planner: PlannerOption = None, as_json: JsonOption = False) -> None:
    """Check this machine and explain which transports will be used, and why. Exit code 1 if a check fails."""
    with reported(as_json=as_json):
        from rfork.storage import doctor as storage
        from rfork.transport import doctor as transport
        from rfork.transport.choice import explain

        chosen = options.load(Settings, planner=planner)
        checks = transport.run_checks(chosen) + storage.run_checks(chosen, options.load(StorageSettings))
        choices = explain(chosen)
        if as_json:
            print_json(
                {
                    "checks": [asdict(check) for check in checks],
                    "transports": [asdict(choice) for choice in choices],
                }
            )
        else:
            table = Table("check", "", "finding", "what to do")
            for check in checks:
                status = f"[{COLOUR[check.status]}]{check.status}[/]"
                table.add_row(check.name, status, escaped(check.detail), escaped(check.fix))
            out.print(table)
            table = Table("transport", "used", "because", "what to do")
            for choice in choices:
                used = f"[green]{choice.place}.[/]" if choice.used else "no"
                table.add_row(choice.name, used, escaped(choice.reason), escaped(choice.hint))
            out.print(table)
        if any(check.status == "fail" for check in checks):
            raise typer.Exit(FAILED)
