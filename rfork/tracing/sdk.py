"""Spans by OpenTelemetry's SDK, sent over OTLP. Only this room imports `opentelemetry`, and only lazily.

The SDK's global tracer is left alone: it is the engine's. So is its current span; a trace that begins here
links to it.
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

TRACES: Final = "/v1/traces"
SEND_S: Final = 10.0
"""Most seconds that one request to the collector takes, retries included."""
MAX_TEXT_CHARS: Final = 4096
"""Characters of one attribute."""
OTEL_SPAN_KINDS: Final = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT, "server": SpanKind.SERVER}
PLAIN: Final = frozenset(
    ("accept", "accept-encoding", "connection", "content-length", "content-type", "host", "user-agent")
)
"""Headers that each request to the collector carries, besides those that the settings name."""
STANDARD: Final = {
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
"""Attributes that OpenTelemetry has names for."""


def sending_tracer(endpoint: str, settings: TracingSettings, service: str) -> SdkTracer:
    """A tracer whose spans go to the collector at `endpoint` until the process ends. Raises SettingsError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(
            "RFORK_TRACING_ENDPOINT cannot be used: it is no URL of a collector",
            hint="e.g. http://127.0.0.1:4318",
        )
    redacted_netloc = parts.netloc.rpartition("@")[2]  # never a password
    traces_url = endpoint if parts.path.endswith(TRACES) else endpoint.rstrip("/") + TRACES
    headers = _headers(settings)
    exporter = OTLPSpanExporter(
        endpoint=traces_url,
        headers=headers,
        timeout=SEND_S,
        compression=Compression.NoCompression,  # else OTEL_* would say, which is about the engine's collector
        session=_Session(headers),
    )
    tracer = SdkTracer(BoundedSpanProcessor(exporter, redacted_netloc), service, settings.share)
    atexit.register(tracer.close)
    return tracer


class SdkTracer:
    """See `rfork.tracing.api.Tracer`; spans go to `processor`."""

    enabled = True

    def __init__(self, processor: SpanProcessor, service: str, share: float = 1.0) -> None:
        """`share`: the part of the traces that begin here which is sent."""
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)),
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
        """See `Tracer.begin`."""
        above = parent or current_context()
        linked = [Link(_foreign(each)) for each in links if each is not None]
        context = Context()
        if above is not None:
            context = trace.set_span_in_context(NonRecordingSpan(_foreign(above)), context)
        elif (engine := trace.get_current_span().get_span_context()).is_valid:
            linked.append(Link(engine))
        return SdkSpan(
            self._tracer.start_span(
                name,
                context=context,
                kind=OTEL_SPAN_KINDS[kind],
                attributes=_attributes(values),
                links=linked,
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
        """Send what is left, for a second at most."""
        self._provider.shutdown()


class SdkSpan:
    """See `rfork.tracing.api.Span`."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        span_context = span.get_span_context()
        trace_id, span_id = (
            trace.format_trace_id(span_context.trace_id),
            trace.format_span_id(span_context.span_id),
        )
        # With OTEL_SDK_DISABLED the engine's SDK and ours make nothing.
        self._context = (
            TraceContext(trace_id, span_id, span_context.trace_flags.sampled) if span_context.is_valid else None
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
    """Sends nothing to the collector that the settings do not name."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__()
        self.trust_env = False  # the settings alone read the environment; proxies do not apply
        self._may_send = PLAIN.union(name.lower() for name in headers)
        own = weakref.ref(self)

        def leave_connections() -> None:
            if (session := own()) is not None:
                for start in tuple(session.adapters):
                    session.mount(start, HTTPAdapter())

        # The child of an `os.fork` must not write into its parent's connections.
        os.register_at_fork(after_in_child=leave_connections)

    def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
        """The request less OTEL_EXPORTER_OTLP_HEADERS: the exporter adds the engine's credentials to ours."""
        prepared = super().prepare_request(request)
        for name in [name for name in prepared.headers if name.lower() not in self._may_send]:
            del prepared.headers[name]
        return prepared


def _foreign(context: TraceContext) -> SpanContext:
    """A span of any process, as the SDK refers to it."""
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
    )


def _attributes(values: dict[str, Value | None]) -> dict[str, Value]:
    return {
        STANDARD.get(name, f"rfork.{name}"): value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }


def _headers(settings: TracingSettings) -> dict[str, str]:
    """The headers that the settings name. Raises SettingsError, which does not tell them."""
    if settings.headers is None:
        return {}
    pairs = [each.partition("=") for each in settings.headers.get_secret_value().split(",") if each.strip()]
    if not all(equals and name.strip() for name, equals, _ in pairs):
        raise SettingsError("RFORK_TRACING_HEADERS cannot be used: it is not NAME=VALUE, comma separated")
    return {name.strip(): value.strip() for name, _, value in pairs}
