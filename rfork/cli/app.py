"""The `rfork` command, assembled from one module per subcommand."""

from __future__ import annotations

import sys
import threading
from typing import Annotated

import typer

from rfork import __version__
from rfork.cli import (
    cache,
    convert,
    demo,
    doctor,
    drain,
    explain,
    hold,
    launch,
    plan,
    planner,
    pull,
    seed,
    sidecar,
    snapshot,
    status,
    top,
)
from rfork.cli.console import handle_errors, hard_exit, out, replace_unencodable_output

app = typer.Typer(
    name="rfork",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would interpret "[env: …]" as markup
)
app.command("planner", short_help="Run the planner.")(planner.planner)
app.command("k8s", short_help="Run the Kubernetes webhook, the controller or the KEDA scaler.")(planner.k8s)
app.command("seed", short_help="Load a model folder and serve its weights.")(seed.seed)
app.command("hold", short_help="Keep images of weights on this host without an engine.")(hold.hold)
app.command("sidecar", short_help="Select seeds for unmodified SGLang servers.")(sidecar.sidecar)
app.command("pull", short_help="Fork a model from running instances.")(pull.pull)
app.command("launch", context_settings=launch.CONTEXT, short_help="Start an SGLang or vLLM server that forks.")(
    launch.launch
)
app.add_typer(snapshot.app, name="snapshot", short_help="Write, list, verify and remove snapshots.")
app.add_typer(cache.app, name="cache", short_help="Save, load and share JIT caches.")
app.command("convert", short_help="Convert tensor files to another format.")(convert.convert)
app.command("status", short_help="Show models, instances and forks.")(status.status)
app.command("top", short_help="Show the fleet live.")(top.top)
app.command("explain", short_help="Explain why a fork was slow or fell back.")(explain.explain)
app.command("plan", short_help="Predict how new replicas would fork.")(plan.plan)
app.command("drain", short_help="Drain instances and wait until they can exit.")(drain.drain)
app.command("doctor", short_help="Check this machine and its settings.")(doctor.doctor)
app.command("demo", short_help="Fork a real model on this machine and verify the result.")(demo.demo)


def _print_version(requested: bool) -> None:
    if requested:
        with handle_errors():
            out.print(__version__)
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """fork() for model weights: start LLM replicas from replicas that are already running."""


def main() -> None:
    """Entry point of the `rfork` script."""
    replace_unencodable_output()
    code: str | int | None = None
    try:
        app()
    except SystemExit as ended:
        code = ended.code
    # gRPC's threads may outlive what they served, even after a successful command.
    if isinstance(code, int | None) and any(each.daemon for each in threading.enumerate()):
        hard_exit(code or 0)
    sys.exit(code)
