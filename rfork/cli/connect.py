"""The planner that a command speaks to."""

from __future__ import annotations

from rfork.control.client import PlannerClient
from rfork.errors import SettingsError
from rfork.settings import Settings


def planner_client(settings: Settings) -> PlannerClient:
    """A client of the planner that the settings name; SettingsError where they name none."""
    if settings.planner is None:
        raise SettingsError("no planner is set", hint="pass --planner URL or set RFORK_PLANNER")
    token = settings.token.get_secret_value() if settings.token is not None else None
    return PlannerClient(
        settings.planner, token=token, tls=settings.tls, timeout_s=settings.planner_timeout_s
    )
