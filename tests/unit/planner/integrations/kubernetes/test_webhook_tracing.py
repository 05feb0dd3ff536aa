"""Spans of reviews."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from planner.integrations.kubernetes.webhook import NodeTopology, admission_app
from rfork.tracing import NOOP_TRACER, TraceContext, Tracer
from rfork.tracing.sdk import MAX_QUEUE, BoundedSpanProcessor, SdkTracer
from tests.unit.planner.integrations.kubernetes.pod_documents import PLANNER, pod, webhook_settings
from tests.unit.planner.integrations.kubernetes.test_reviews import BINDING, review
from tests.unit.tracing.span_recorder import SpanRecorder

API_SERVER = TraceContext("1" * 32, "2" * 16)


async def post(tracer: Tracer, *bodies: object, path: str = "/mutate", caller: TraceContext | None = None) -> list[int]:
    """Send reviews one after the other and return their statuses."""
    settings = webhook_settings()
    app = admission_app(settings, PLANNER, NodeTopology(settings), CollectorRegistry(), tracer=tracer)
    headers = {} if caller is None else {"traceparent": caller.traceparent}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="https://webhook", headers=headers) as client:
        return [(await client.post(path, content=json.dumps(body))).status_code for body in bodies]


async def test_a_review_continues_the_api_servers_trace() -> None:
    """With OpenTelemetry's attribute names."""
    recorder = SpanRecorder()
    assert [200] == await post(recorder.tracer, review(pod(), name="llama-0"), caller=API_SERVER)
    span, attributes = recorder.spans["POST /mutate"], recorder.attributes("POST /mutate")
    assert API_SERVER.trace_id == f"{span.context.trace_id:032x}"
    assert "another process's" == recorder.parent("POST /mutate")
    assert "serving" == attributes["k8s.namespace.name"]
    assert "llama-0" == attributes["k8s.pod.name"]
    assert "injected" == attributes["rfork.result"]
    assert "POST" == attributes["http.request.method"]
    assert "/mutate" == attributes["http.route"]
    assert 200 == attributes["http.response.status_code"]
    assert "rfork.model" in attributes


async def test_an_invalid_review_has_a_span() -> None:
    """With its status, which is an error of the caller."""
    recorder = SpanRecorder()
    assert [400] == await post(recorder.tracer, {"kind": "Pod"})
    attributes = recorder.attributes("POST /mutate")
    assert "malformed" == attributes["rfork.result"]
    assert 400 == attributes["http.response.status_code"]
    assert recorder.spans["POST /mutate"].status.is_unset


async def test_bindings_and_untraced_reviews_have_no_spans() -> None:
    """Bindings exist for all Pods of a cluster. A traced caller does not turn tracing on."""
    recorder = SpanRecorder()
    binding = {"metadata": {"name": "a"}, "target": {"name": "a"}}
    assert [200] == await post(recorder.tracer, review(binding, kind=BINDING), path="/bind", caller=API_SERVER)
    assert [200] == await post(NOOP_TRACER, review(pod()), caller=API_SERVER)
    assert [] == recorder.names


async def test_names_with_invalid_unicode_are_exported() -> None:
    """Collectors accept only UTF-8: an unpaired surrogate would lose all spans of the batch."""
    recorder = SpanRecorder()
    assert [200] == await post(recorder.tracer, review(pod(), name="a\ud800b"))
    str(recorder.attributes("POST /mutate")["k8s.pod.name"]).encode()


class HangingExporter(SpanExporter):
    """A collector that accepts a request and does not respond before the end of the test."""

    def __init__(self) -> None:
        self.export_started, self.released = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.export_started.set()
        self.released.wait()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.released.set()


@pytest.fixture
def hanging_exporter() -> Iterator[HangingExporter]:
    exporter = HangingExporter()
    yield exporter
    exporter.released.set()


async def test_an_unresponsive_collector_does_not_delay_admission(hanging_exporter: HangingExporter) -> None:
    """While it blocks, Pods are admitted; spans that do not fit in the queue are dropped."""
    queue = BoundedSpanProcessor(hanging_exporter, "collector")
    tracer = SdkTracer(queue, "rfork-webhook")
    assert [200] == await post(tracer, review(pod()))
    hanging_exporter.export_started.wait()
    for _ in range(MAX_QUEUE):
        tracer.start_span("filler").end()
    assert [200, 200] == await post(tracer, review(pod()), review(pod()))
    assert queue.dropped >= 2
    hanging_exporter.released.set()
    tracer.close()
