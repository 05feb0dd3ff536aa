"""OTLP collector on loopback that stores received spans, or hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent

LONG_FLUSH_PATCH = "import rfork.tracing.sdk as queue\nqueue.CLOSE_S = 60.0\n"
"""Startup patch of a process that flushes its last spans without a timeout on a busy machine."""

Value = str | bool | int | float | list[str]


@dataclass(frozen=True)
class CollectedSpan:
    """A received span; ids in hexadecimal, `parent` empty for a root span."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    failed: bool
    seconds: float
    attributes: dict[str, Value]
    events: tuple[str, ...]
    links: tuple[str, ...]


@dataclass
class OtlpCollector:
    """Spans that the collector at `url` received."""

    url: str = ""
    hangs: bool = False
    """Accept requests and never respond."""
    spans: list[CollectedSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    request_received: threading.Event = field(default_factory=threading.Event)
    shutdown: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, body: bytes, headers: dict[str, str]) -> None:
        """Store the spans of one request."""
        request = ExportTraceServiceRequest.FromString(body)
        with self.lock:
            self.headers.append(headers)
            for resource in request.resource_spans:
                service = str(_values(resource.resource.attributes)["service.name"])
                for scope in resource.scope_spans:
                    self.spans += [_collected(service, span) for span in scope.spans]

    def spans_named(self, name: str) -> list[CollectedSpan]:
        """Return the spans of a name in the order of arrival."""
        with self.lock:
            return [span for span in self.spans if span.name == name]


@contextmanager
def running_collector(*, hangs: bool = False) -> Iterator[OtlpCollector]:
    """Run a collector inside the block."""
    collector = OtlpCollector(hangs=hangs)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.request_received.set()
            if collector.hangs:
                collector.shutdown.wait()
                return
            collector.record(body, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, name="collector", daemon=True)
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            collector.shutdown.set()
            server.shutdown()
            thread.join()


def _collected(service: str, span: Sent) -> CollectedSpan:
    return CollectedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        attributes=_values(span.attributes),
        events=tuple(event.name for event in span.events),
        links=tuple(link.trace_id.hex() for link in span.links),
    )


def _values(attributes: Iterable[KeyValue]) -> dict[str, Value]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Value:
    if value.HasField("array_value"):
        return [item.string_value for item in value.array_value.values]
    field_name = value.WhichOneof("value")
    return "" if field_name is None else getattr(value, field_name)
