"""Tracing: spans joined across processes into one trace. Off unless the settings name a collector.

Each process gets its tracer from `get_tracer`. Without tracing that is `NOOP_TRACER`, which does nothing and
imports nothing; `current_context` is then None and `inject` returns nothing. Contexts are sent as W3C trace
contexts, in the header or gRPC metadata ``traceparent``.

Does not import torch, and never blocks: spans wait in a bounded queue, and are dropped if the collector does
not accept them.
"""

from rfork.tracing.api import NO_SPAN, NOOP_TRACER, Span, Tracer, Value
from rfork.tracing.context import TRACEPARENT, TraceContext, current_context, inject, use_context
from rfork.tracing.tracer import PLANNER, get_tracer

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
