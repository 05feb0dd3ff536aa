"""`rfork planner` and `rfork k8s`: run the planner, and its Kubernetes and KEDA integrations in a separate process."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from rfork import settings as options
from rfork.cli.console import configure_logs, handle_errors, log_misspelt_variables, print_result, requires_extra
from rfork.cli.options import JsonOption
from rfork.errors import SettingsError
from rfork.settings import InstanceSettings, IntegrationName, KubernetesSettings, PlannerSettings

INTEGRATIONS: tuple[IntegrationName, ...] = get_args(IntegrationName)


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


def k8s(
    names: Annotated[
        list[str], typer.Argument(metavar="INTEGRATION...", help=f"One or more of: {', '.join(INTEGRATIONS)}.")
    ],
    planner: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of the planner used by the integration [env: RFORK_PLANNER]")
    ] = None,
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on [env: RFORK_K8S_BIND]")
    ] = None,
) -> None:
    """Run Kubernetes integrations: the admission webhook, the scale-up controller or the KEDA scaler.

    All other settings are RFORK_K8S_*. The process exits if one integration fails. /healthz, /readyz and
    /metrics are served at RFORK_K8S_HEALTH_PORT.
    """
    with handle_errors():
        if unknown := [name for name in names if name not in INTEGRATIONS]:
            raise SettingsError(f"unknown integration {unknown[0]!r}: choose from {', '.join(INTEGRATIONS)}")
        kubernetes_settings = options.load(KubernetesSettings, bind=bind)
        settings = options.load(InstanceSettings, planner=planner)
        configure_logs(settings)
        log_misspelt_variables()
        with requires_extra("`rfork k8s`", "kubernetes"):
            from planner.integrations.runner import run_until_signal

        run_until_signal([name for name in INTEGRATIONS if name in names], kubernetes_settings, settings)
