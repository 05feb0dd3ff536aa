"""Spans: what took how long, joined over processes by one trace; off unless the settings name a collector.

Every process of rfork asks `tracer` for its own. Where nothing is traced that is `OFF`, which does nothing
and imports nothing; a context (`here`) is then None, and `carrier` empty. Contexts travel as W3C trace
contexts: the header, or gRPC metadata, ``traceparent``.

Nothing here imports torch, and nothing here is waited for: spans wait in a queue of bounded length, and
are dropped where the collector does not take them.
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
