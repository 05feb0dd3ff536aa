"""The `rfork` command: one module a subcommand, put together here."""

from __future__ import annotations

import typer

from rfork import __version__
from rfork.cli import (
    artifacts,
    convert,
    doctor,
    drain,
    hook,
    launch,
    planner,
    pull,
    seed,
    sidecar,
    snapshot,
    status,
)
from rfork.cli.console import out
from rfork.cli.demo import command as demo

app = typer.Typer(
    name="rfork",
    help="fork() for model weights: new inference instances pull their weights from those that run.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # or it would take "[env: …]" for markup
)
app.command("planner")(planner.planner)
app.command("hook")(hook.hook)
app.command("seed")(seed.seed)
app.command("sidecar")(sidecar.sidecar)
app.command("pull")(pull.pull)
app.command("launch", context_settings=launch.CONTEXT)(launch.launch)
app.add_typer(snapshot.app, name="snapshot")
app.add_typer(artifacts.app, name="artifacts")
app.command("convert")(convert.convert)
app.command("status")(status.status)
app.command("drain")(drain.drain)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


@app.command("version")
def version() -> None:
    """Print the version."""
    out.print(__version__)


def main() -> None:
    """Entry point of the `rfork` script."""
    app()
