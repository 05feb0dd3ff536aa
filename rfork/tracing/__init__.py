"""Spans: what took how long, joined over processes by one trace; off unless the settings name a collector.

Every process of rfork asks `tracer` for its own. Where nothing is traced that is `OFF`, which does nothing
and imports nothing; a context (`here`) is then None, and `carrier` empty. Contexts travel as W3C trace
contexts: the header, or gRPC metadata, ``traceparent``.

Nothing here imports torch, and nothing here is waited for: spans wait in a queue of bounded length, and
are dropped where the collector does not take them.
"""

from rfork.tracing.context import TRACEPARENT, TraceContext, carrier, here, within
from rfork.tracing.process import PLANNER, tracer
from rfork.tracing.seam import NO_SPAN, OFF, Span, Tracer, Value

__all__ = [
    "NO_SPAN",
    "OFF",
    "PLANNER",
    "TRACEPARENT",
    "Span",
    "TraceContext",
    "Tracer",
    "Value",
    "carrier",
    "here",
    "tracer",
    "within",
]
