"""Tracing with OpenTelemetry's SDK, sent over OTLP through a bounded queue.

Only this module imports `opentelemetry`; it is imported lazily.

The SDK's global tracer belongs to the engine and is not used. The engine's current span is not a parent
either; a trace that begins here links to it. OpenTelemetry's own batch processor is not used because it
blocks the exit of a process if the collector hangs, and does not count dropped spans.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

import requests
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from requests.adapters import HTTPAdapter

import rfork
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import TracingSettings
from rfork.tracing.api import Span, SpanKindName, TraceContext, Value, current_context, use_context

MAX_QUEUE: Final = 4096
"""Maximum number of queued spans: a fork of a hundred sources creates about two hundred."""
MAX_BATCH: Final = 512
"""Maximum number of spans per request."""
MAX_DELAY_S: Final = 0.5
"""Maximum delay of a span before it is sent with others."""
CLOSE_S: Final = 1.0
"""Maximum seconds for which the exit of a process waits for the collector."""

log = logger(__name__)


class BoundedSpanProcessor(SpanProcessor):
    """Sends finished spans to `exporter`; never blocks the thread that ends a span."""

    def __init__(self, exporter: SpanExporter, collector: str) -> None:
        """`collector`: its URL, for the log."""
        self._exporter = exporter
        self._collector = collector
        self._changed = threading.Condition()
        self._queue: deque[ReadableSpan] = deque()
        self._sending = 0
        self._closing = self._drops_counted = False
        self._dropped = 0
        self._thread: threading.Thread | None = None
        own = weakref.ref(self)

        def reset_after_fork() -> None:
            if (processor := own()) is not None:
                processor._reset_after_fork()

        os.register_at_fork(after_in_child=reset_after_fork)

    @property
    def dropped(self) -> int:
        """Number of spans known not to have reached the collector."""
        with self._changed:
            return self._dropped

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor.on_end`."""
        if not span.context.trace_flags.sampled:
            return
        with self._changed:
            if self._closing or len(self._queue) >= MAX_QUEUE or not self._ensure_thread():
                first = self._drop(1)
            else:
                first = False
                self._queue.append(span)
                self._changed.notify_all()
        self._log_drops(first, "the collector is too slow")

    def shutdown(self) -> None:
        """Send queued spans within `CLOSE_S`, and log the number of dropped ones. Safe to call twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)
        with self._changed:
            self._drop(len(self._queue) + self._sending)
            self._drops_counted = True  # ignore later results of the thread, which may still run
            self._queue.clear()
            dropped = self._dropped
        if dropped:
            log.warning("tracing spans dropped in total", spans=dropped, collector=self._collector)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until all finished spans were sent or dropped; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._sending), timeout_millis / 1000)

    def _reset_after_fork(self) -> None:
        """Reset the child of an `os.fork`, which has no thread, and where the lock may be locked forever."""
        self._changed = threading.Condition()
        self._queue.clear()  # the parent sends them
        self._sending = self._dropped = 0
        self._thread = None

    def _ensure_thread(self) -> bool:
        """Start the thread with the first span; return whether it exists."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="rfork-spans", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # thread limit reached, or the interpreter is exiting
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        for name in _EXPORTER_LOGGERS:
            logging.getLogger(name).addFilter(_filter_exporter_logs)
        while batch := self._next():
            reason = self._send(batch)
            with self._changed:
                self._sending = 0
                first = bool(reason) and not self._drops_counted and self._drop(len(batch))
                self._changed.notify_all()
            self._log_drops(first, reason)

    def _next(self) -> list[ReadableSpan]:
        """Return the next spans to send; empty when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._changed.wait_for(lambda: len(self._queue) >= MAX_BATCH or self._closing, MAX_DELAY_S)
            batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            self._sending = len(batch)
            return batch

    def _send(self, batch: Sequence[ReadableSpan]) -> str:
        """Send spans. Return the reason if that failed, else an empty text."""
        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # exporters may raise anything, and later spans must still be sent
            return f"{type(error).__name__}: {error}"
        return "" if sent else "the collector rejected the spans"

    def _drop(self, spans: int) -> bool:
        """Count dropped spans; return whether these are the first. Called with the lock."""
        first = not self._dropped and bool(spans)
        self._dropped += spans
        return first

    def _log_drops(self, first: bool, reason: str) -> None:
        if first:
            log.warning("dropping tracing spans", collector=self._collector, reason=reason)


_EXPORTER_LOGGERS: Final[Iterable[str]] = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "urllib3.connectionpool",
)


def _filter_exporter_logs(record: logging.LogRecord) -> bool:
    """Suppress the exporter's log of each failure, logged once here; keep those of other exporters."""
    return record.threadName != "rfork-spans"


TRACES_PATH: Final = "/v1/traces"
REQUEST_TIMEOUT_S: Final = 10.0
"""Maximum duration of a request to the collector, including retries."""
MAX_TEXT_CHARS: Final = 4096
"""Maximum length of an attribute."""
OTEL_SPAN_KINDS: Final = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT, "server": SpanKind.SERVER}
DEFAULT_HEADERS: Final = frozenset(
    ("accept", "accept-encoding", "connection", "content-length", "content-type", "host", "user-agent")
)
"""Headers sent with each request to the collector, in addition to those of the settings."""
STANDARD_ATTRIBUTES: Final = {
    "deployment": "k8s.deployment.name",
    "error_type": "error.type",
    "method": "http.request.method",
    "namespace": "k8s.namespace.name",
    "path": "url.path",
    "pod": "k8s.pod.name",
    "pod_uid": "k8s.pod.uid",
    "route": "http.route",
    "rpc": "rpc.system.name",
    "rpc_method": "rpc.method",
    "rpc_status": "rpc.response.status_code",
    "server": "server.address",
    "statefulset": "k8s.statefulset.name",
    "status": "http.response.status_code",
}
"""Names of attributes in OpenTelemetry's semantic conventions; all others begin with `rfork.`."""


def otlp_tracer(endpoint: str, settings: TracingSettings, service: str) -> SdkTracer:
    """Return a tracer that sends spans to the collector at `endpoint`. Raises SettingsError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(
            "RFORK_TRACING_ENDPOINT is not the URL of a collector",
            hint="e.g. http://127.0.0.1:4318",
        )
    redacted_netloc = parts.netloc.rpartition("@")[2]  # without a password
    traces_url = endpoint if parts.path.endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH
    headers = _headers(settings)
    exporter = OTLPSpanExporter(
        endpoint=traces_url,
        headers=headers,
        timeout=REQUEST_TIMEOUT_S,
        compression=Compression.NoCompression,  # otherwise OTEL_* would decide, which is for the engine's collector
        session=_Session(headers),
    )
    tracer = SdkTracer(BoundedSpanProcessor(exporter, redacted_netloc), service, settings.sample_ratio)
    atexit.register(tracer.close)
    return tracer


class SdkTracer:
    """Implements `rfork.tracing.api.Tracer`; sends spans to `processor`."""

    enabled = True

    def __init__(self, processor: SpanProcessor, service: str, sample_ratio: float = 1.0) -> None:
        """`sample_ratio`: ratio of the traces started here that are exported."""
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(
                {
                    "service.name": service,
                    "service.version": rfork.__version__,
                    "host.name": socket.gethostname(),
                    "process.pid": os.getpid(),
                }
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rfork", rfork.__version__)

    def start_span(
        self,
        name: str,
        *,
        parent: TraceContext | None = None,
        links: Sequence[TraceContext | None] = (),
        kind: SpanKindName = "internal",
        **values: Value | None,
    ) -> Span:
        """See `Tracer.start_span`."""
        parent = parent or current_context()
        otel_links = [Link(_to_span_context(link)) for link in links if link is not None]
        context = Context()
        if parent is not None:
            context = trace.set_span_in_context(NonRecordingSpan(_to_span_context(parent)), context)
        elif (engine_context := trace.get_current_span().get_span_context()).is_valid:
            otel_links.append(Link(engine_context))
        return SdkSpan(
            self._tracer.start_span(
                name,
                context=context,
                kind=OTEL_SPAN_KINDS[kind],
                attributes=_attributes(values),
                links=otel_links,
            )
        )

    @contextmanager
    def span(
        self,
        name: str,
        *,
        parent: TraceContext | None = None,
        links: Sequence[TraceContext | None] = (),
        kind: SpanKindName = "internal",
        **values: Value | None,
    ) -> Iterator[Span]:
        """See `Tracer.span`."""
        span = self.start_span(name, parent=parent, links=links, kind=kind, **values)
        try:
            with use_context(span.context):
                yield span
        except BaseException as error:
            span.fail(error)
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Send the remaining spans, within a second."""
        self._provider.shutdown()


class SdkSpan:
    """Implements `rfork.tracing.api.Span`."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        span_context = span.get_span_context()
        self._context: TraceContext | None = None
        if span_context.is_valid:  # unless OTEL_SDK_DISABLED is set, which also applies here
            self._context = TraceContext(
                trace.format_trace_id(span_context.trace_id),
                trace.format_span_id(span_context.span_id),
                span_context.trace_flags.sampled,
            )

    @property
    def context(self) -> TraceContext | None:
        """See `Span.context`."""
        return self._context

    def set(self, **values: Value | None) -> None:
        """See `Span.set`."""
        if self._span.is_recording():
            self._span.set_attributes(_attributes(values))

    def event(self, name: str, **values: Value | None) -> None:
        """See `Span.event`."""
        if self._span.is_recording():
            self._span.add_event(name, _attributes(values))

    def fail(self, error: BaseException | str) -> None:
        """See `Span.fail`."""
        if not self._span.is_recording():
            return
        if isinstance(error, BaseException):
            self.set(error_type=type(error).__name__)
            error = f"{type(error).__name__}: {error}"
        self._span.set_status(Status(StatusCode.ERROR, error[:MAX_TEXT_CHARS]))

    def end(self) -> None:
        """See `Span.end`."""
        if self._span.is_recording():
            self._span.end()


class _Session(requests.Session):
    """HTTP session that sends only headers from the settings to the collector."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__()
        self.trust_env = False  # only the settings read the environment; no proxies
        self._allowed_headers = DEFAULT_HEADERS.union(name.lower() for name in headers)
        session_ref = weakref.ref(self)

        def replace_connections() -> None:
            if (session := session_ref()) is not None:
                for url_prefix in tuple(session.adapters):
                    session.mount(url_prefix, HTTPAdapter())

        # The child of an `os.fork` must not write to its parent's connections.
        os.register_at_fork(after_in_child=replace_connections)

    def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
        """Prepare the request, without the engine's OTEL_EXPORTER_OTLP_HEADERS, which the exporter adds."""
        prepared = super().prepare_request(request)
        for name in list(prepared.headers):
            if name.lower() not in self._allowed_headers:
                del prepared.headers[name]
        return prepared


def _to_span_context(context: TraceContext) -> SpanContext:
    """Convert a context of any process to the SDK's type."""
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
    )


def _attributes(values: dict[str, Value | None]) -> dict[str, Value]:
    return {
        STANDARD_ATTRIBUTES.get(name, f"rfork.{name}"): value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }


def _headers(settings: TracingSettings) -> dict[str, str]:
    """Return the headers from the settings. Raises SettingsError, without their values."""
    if settings.headers is None:
        return {}
    pairs = [each.partition("=") for each in settings.headers.get_secret_value().split(",") if each.strip()]
    if not all(equals and name.strip() for name, equals, _ in pairs):
        raise SettingsError("RFORK_TRACING_HEADERS is not a comma-separated list of NAME=VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}
