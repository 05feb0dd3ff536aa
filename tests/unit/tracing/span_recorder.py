"""A tracer that keeps its spans in memory."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rfork.tracing.sdk import SdkTracer


class SpanRecorder:
    """Records the finished spans of `tracer`."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = SdkTracer(SimpleSpanProcessor(self._exporter), "rfork-test", sample_ratio)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """Spans by name; of several, the last one."""
        return {span.name: span for span in self._exporter.get_finished_spans()}

    @property
    def names(self) -> list[str]:
        """Names of the spans, in the order in which they ended."""
        return [span.name for span in self._exporter.get_finished_spans()]

    def all_named(self, name: str) -> list[ReadableSpan]:
        """Return the spans with this name, in the order in which they ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def parent(self, name: str) -> str | None:
        """Return the name of the parent span; None for the first span of a trace."""
        parent_context = self.spans[name].parent
        names_by_id = {span.context.span_id: span.name for span in self._exporter.get_finished_spans()}
        return None if parent_context is None else names_by_id.get(parent_context.span_id, "another process's")

    def attributes(self, name: str) -> dict[str, object]:
        """Return the attributes of a span."""
        return dict(self.spans[name].attributes or {})
