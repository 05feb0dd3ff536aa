"""Tracing with OpenTelemetry's SDK, sent over OTLP.

Only this module and `span_processor` import `opentelemetry`; both are imported lazily.

The SDK's global tracer belongs to the engine and is not used. The engine's current span is not a parent
either; a trace that begins here links to it.
"""

from __future__ import annotations

import atexit
import os
import socket
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

import requests
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from requests.adapters import HTTPAdapter

import rfork
from rfork.errors import SettingsError
from rfork.settings import TracingSettings
from rfork.tracing.api import Span, SpanKindName, Value
from rfork.tracing.context import TraceContext, current_context, use_context
from rfork.tracing.span_processor import BoundedSpanProcessor

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
