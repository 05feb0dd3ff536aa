"""The tracer of this process, from its settings."""

from __future__ import annotations

import functools
from typing import Final

from rfork import settings as options
from rfork.errors import MissingExtra
from rfork.settings import TracingSettings
from rfork.tracing.api import NOOP_TRACER, Tracer

INSTANCE: Final = "rfork-instance"
PLANNER: Final = "rfork-planner"


@functools.cache
def get_tracer(service: str = INSTANCE) -> Tracer:
    """Return the tracer of a service in this process. It is created once and lasts until the process exits.

    Raises SettingsError for unusable settings, and MissingExtra without OpenTelemetry's packages.
    """
    settings = options.load(TracingSettings)
    if settings.endpoint is None:
        return NOOP_TRACER
    try:
        from rfork.tracing.sdk import otlp_tracer
    except ImportError as error:
        raise MissingExtra("tracing (RFORK_TRACING_ENDPOINT)", extra="tracing", reason=str(error)) from None
    return otlp_tracer(settings.endpoint, settings, service)
