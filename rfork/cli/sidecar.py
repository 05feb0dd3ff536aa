"""`rfork sidecar`: coordinate R-Fork for an unmodified SGLang server."""

from __future__ import annotations

from typing import Annotated

import typer

from rfork import settings as options
from rfork.cli.console import configure_logs, err, handle_errors, log_misspelt_variables, print_result, requires_extra
from rfork.cli.options import BindOption, HostOption, JsonOption, PlannerOption
from rfork.settings import InstanceSettings, SidecarSettings
from rfork.shutdown import shutdown_on_signal, wait_for_shutdown


def sidecar(
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of the SGLang server [env: RFORK_SIDECAR_ENGINE_URL]")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name under which the server's weights are published [default: the name that it serves] "
            "[env: RFORK_MODEL]",
            show_default=False,
        ),
    ] = None,
    client_of_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Model whose seeds are offered to SGLang clients [env: RFORK_SIDECAR_SOURCE_MODEL]"
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port for SGLang clients; 0 picks one [env: RFORK_SIDECAR_PORT]")
    ] = None,
    planner: PlannerOption = None,
    bind: BindOption = None,
    host: HostOption = None,
    as_json: JsonOption = False,
) -> None:
    """Select seeds for unmodified SGLang servers, which copy weights with SGLang's own R-Fork.

    Publishes a server as a seed, and connects SGLang clients to the seed that the planner chose.

    Weights are not verified and leases are not enforced: see docs/sidecar.md.
    """
    with handle_errors(as_json=as_json):
        chosen = options.load(InstanceSettings, planner=planner, bind=bind, node_name=host, model=model)
        own = options.load(SidecarSettings, engine_url=engine, source_model=client_of_model, port=port)
        configure_logs(chosen, as_json=as_json)
        log_misspelt_variables()
        with requires_extra("`rfork sidecar`", "sidecar"):
            from rfork.engines.sglang_bridge.sidecar import Sidecar

        with Sidecar(chosen, own) as running:
            stopped = shutdown_on_signal()
            clients, seeds = running.client_address, running.seed_address
            served = [
                f"SGLang clients connect to {clients}" if clients else "",
                f"other sidecars connect to {seeds}" if seeds else "",
            ]
            print_result(
                {"event": "ready", "clients": clients, "seeds": seeds, "engine": own.engine_url},
                f"sidecar ready: {', '.join(filter(None, served))}",
                as_json=as_json,
            )
            wait_for_shutdown(stopped)
            err.print("closing: waiting for readers")
