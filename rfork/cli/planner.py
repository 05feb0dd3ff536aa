"""`rfork planner`: run the planner."""

from __future__ import annotations

from typing import Annotated

import typer

from rfork import settings as options
from rfork.cli.console import configure_logs, handle_errors, log_misspelt_variables, print_result, requires_extra
from rfork.cli.options import JsonOption
from rfork.settings import InstanceSettings, PlannerSettings


def planner(
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on [env: RFORK_PLANNER_BIND]")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port to listen on; 0 picks one [env: RFORK_PLANNER_PORT]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the planner, which registers instances and plans which target reads from which sources."""
    with handle_errors(as_json=as_json):
        chosen = options.load(PlannerSettings, bind=bind, port=port)
        configure_logs(options.load(InstanceSettings), as_json=as_json)
        log_misspelt_variables()
        with requires_extra("`rfork planner`", "planner"):
            from planner.server import serve

        def ready(url: str) -> None:
            text = f"planner ready at {url} (page: {url}/ui, API: {url}/docs)"
            print_result({"event": "ready", "url": url}, text, as_json=as_json)

        serve(chosen, ready)
