"""`rfork hook`: run the planner's hooks into Kubernetes and KEDA, in a process of their own."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from rfork import settings as options
from rfork.cli.console import configure_logs, handle_errors
from rfork.errors import SettingsError
from rfork.settings import InstanceSettings, IntegrationName, KubernetesSettings

INTEGRATIONS: tuple[IntegrationName, ...] = get_args(IntegrationName)


def hook(
    names: Annotated[list[str], typer.Argument(metavar="HOOK...", help=f"One or more of {', '.join(INTEGRATIONS)}")],
    planner: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL of the planner, for the hook itself [env: RFORK_PLANNER]"),
    ] = None,
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on [env: RFORK_K8S_BIND]")
    ] = None,
) -> None:
    """Run hooks: the admission webhook, the scale-up controller, KEDA's scaler. All else is RFORK_K8S_*.

    Ends with one of them that fails. /healthz, /readyz and /metrics are at RFORK_K8S_HEALTH_PORT.
    """
    with handle_errors():
        if unknown := [name for name in names if name not in INTEGRATIONS]:
            raise SettingsError(f"no hook is called {unknown[0]!r}: there are {', '.join(INTEGRATIONS)}")
        hook_settings = options.load(KubernetesSettings, bind=bind)
        settings = options.load(InstanceSettings, planner=planner)
        configure_logs(settings)
        from planner.integrations.runner import run_until_signal

        run_until_signal([name for name in INTEGRATIONS if name in names], hook_settings, settings)
