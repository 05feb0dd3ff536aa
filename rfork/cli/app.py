"""The `rfork` command: one module a subcommand, put together here."""

from __future__ import annotations

import sys
import threading

import typer

from rfork import __version__
from rfork.cli import (
    cache,
    convert,
    doctor,
    drain,
    forks,
    k8s,
    launch,
    plan,
    planner,
    pull,
    seed,
    sidecar,
    snapshot,
    status,
)
from rfork.cli.console import handle_errors, hard_exit, out, print_json, replace_unencodable_output
from rfork.cli.demo import command as demo
from rfork.cli.explain import command as explain
from rfork.cli.options import JsonOption
from rfork.cli.top import command as top

app = typer.Typer(
    name="rfork",
    help="fork() for model weights: new inference instances pull their weights from those that run.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # or it would take "[env: …]" for markup
)
app.command("planner", short_help="Run the planner: it says who reads from whom.")(planner.planner)
app.command("hook", short_help="Run the planner's hooks into Kubernetes and KEDA.")(k8s.hook)
app.command("seed", short_help="Load a model folder, and give its weights.")(seed.seed)
app.command("sidecar", short_help="Plan the R-Fork of an unmodified SGLang server.")(sidecar.sidecar)
app.command("pull", short_help="Fork a model from those that run.")(pull.pull)
app.command("launch", context_settings=launch.CONTEXT, short_help="Start SGLang or vLLM so that it forks.")(
    launch.launch
)
app.add_typer(snapshot.app, name="snapshot", short_help="Write weights to storage, list and verify them.")
app.add_typer(cache.app, name="artifacts", short_help="Save, give and take JIT caches.")
app.command("convert", short_help="Write tensor files in another format.")(convert.convert)
app.command("status", short_help="Show who holds what, and who reads from whom.")(status.status)
app.command("top", short_help="Show the fleet live.")(top.top)
app.command("forks", short_help="List forks, or follow them.")(forks.forks)
app.command("explain", short_help="Say why a fork was slow, or fell back.")(explain.explain)
app.command("plan", short_help="Show who would read what from whom, and how long it takes.")(plan.plan)
app.command("drain", short_help="Give instances no new readers, and wait.")(drain.drain)
app.command("doctor", short_help="Check this machine and its settings.")(doctor.doctor)
app.command("demo", short_help="Fork a real model on this machine, and prove it.")(demo.demo)


@app.command("version")
def version(as_json: JsonOption = False) -> None:
    """Print the version."""
    with handle_errors(as_json=as_json):
        if as_json:
            print_json({"version": __version__})
        else:
            out.print(__version__)


def main() -> None:
    """Entry point of the `rfork` script."""
    replace_unencodable_output()
    code: str | int | None = None
    try:
        app()
    except SystemExit as ended:
        code = ended.code
    # Also one that did all it had to: gRPC's threads last a little longer than what they served.
    if isinstance(code, int | None) and any(each.daemon for each in threading.enumerate()):
        hard_exit(code or 0)
    sys.exit(code)
