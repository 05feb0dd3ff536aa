"""Reviews of Pods as spans."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from planner.integrations.kubernetes.topology import NodeTopology
from planner.integrations.kubernetes.webhook_app import admission_app
from rfork.tracing import NOOP_TRACER, TraceContext, Tracer
from rfork.tracing.sdk import SdkTracer
from rfork.tracing.span_processor import MAX_QUEUE, BoundedSpanProcessor
from tests.unit.planner.integrations.kubernetes.pod_documents import PLANNER, pod, webhook_settings
from tests.unit.planner.integrations.kubernetes.test_webhook_app import BINDING, review
from tests.unit.tracing.span_recorder import SpanRecorder

API_SERVER = TraceContext("1" * 32, "2" * 16)


async def post(tracer: Tracer, *bodies: object, path: str = "/mutate", caller: TraceContext | None = None) -> list[int]:
    """The statuses of reviews, sent one after the other."""
    settings = webhook_settings()
    app = admission_app(settings, PLANNER, NodeTopology(settings), CollectorRegistry(), tracer=tracer)
    headers = {} if caller is None else {"traceparent": caller.traceparent}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="https://webhook", headers=headers) as client:
        return [(await client.post(path, content=json.dumps(body))).status_code for body in bodies]


async def test_a_review_goes_on_with_the_trace_of_the_api_server() -> None:
    """By the names that OpenTelemetry has for what it is about."""
    recorder = SpanRecorder()
    assert [200] == await post(recorder.tracer, review(pod(), name="llama-0"), caller=API_SERVER)
    span, attributes = recorder.spans["POST /mutate"], recorder.attributes("POST /mutate")
    assert (API_SERVER.trace_id, "another process's") == (
        f"{span.context.trace_id:032x}",
        recorder.parent("POST /mutate"),
    )
    assert ("serving", "llama-0", "injected", "POST", "/mutate", 200) == tuple(
        attributes[name]
        for name in (
            "k8s.namespace.name", "k8s.pod.name", "rfork.result", "http.request.method", "http.route",
            "http.response.status_code",
        )
    )  # fmt: skip
    assert "rfork.model" in attributes


async def test_what_is_no_review_is_a_span_too() -> None:
    """With its status, which is the caller's own fault."""
    recorder = SpanRecorder()
    assert [400] == await post(recorder.tracer, {"kind": "Pod"})
    attributes = recorder.attributes("POST /mutate")
    assert ("malformed", 400, True) == (
        attributes["rfork.result"],
        attributes["http.response.status_code"],
        recorder.spans["POST /mutate"].status.is_unset,
    )


async def test_bindings_and_what_is_not_traced_are_no_spans() -> None:
    """Bindings are those of all Pods of a cluster; a caller that traces asks for nothing where we do not."""
    recorder = SpanRecorder()
    binding = {"metadata": {"name": "a"}, "target": {"name": "a"}}
    assert [200] == await post(recorder.tracer, review(binding, kind=BINDING), path="/bind", caller=API_SERVER)
    assert [200] == await post(NOOP_TRACER, review(pod()), caller=API_SERVER)
    assert [] == recorder.names


async def test_names_that_are_no_text_are_sent_all_the_same() -> None:
    """A collector takes UTF-8 alone: half a character would cost it all spans that go with this one."""
    recorder = SpanRecorder()
    assert [200] == await post(recorder.tracer, review(pod(), name="a\ud800b"))
    str(recorder.attributes("POST /mutate")["k8s.pod.name"]).encode()


class HangingExporter(SpanExporter):
    """A collector that takes a request and never answers, until the test is over."""

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


async def test_a_collector_that_hangs_holds_no_admission(hanging_exporter: HangingExporter) -> None:
    """While it holds a request, Pods are answered; what does not fit in the queue is dropped."""
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
