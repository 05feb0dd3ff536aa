"""Tracing: spans joined across processes into one trace. Off unless the settings name a collector.

Each process gets its tracer from `get_tracer`. Without tracing that is `NOOP_TRACER`, which does nothing and
imports nothing; `current_context` is then None and `inject` returns nothing. Contexts are sent as W3C trace
contexts, in the header or gRPC metadata ``traceparent``.

Does not import torch, and never blocks: spans wait in a bounded queue, and are dropped if the collector does
not accept them.
"""

from __future__ import annotations

import functools
from typing import Final

from rfork import settings as options
from rfork.errors import MissingExtra
from rfork.settings import TracingSettings
from rfork.tracing.api import (
    NO_SPAN,
    NOOP_TRACER,
    TRACEPARENT,
    Span,
    TraceContext,
    Tracer,
    Value,
    current_context,
    inject,
    use_context,
)

__all__ = [
    "NOOP_TRACER",
    "NO_SPAN",
    "PLANNER",
    "TRACEPARENT",
    "Span",
    "TraceContext",
    "Tracer",
    "Value",
    "current_context",
    "get_tracer",
    "inject",
    "use_context",
]

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
