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

from planner.hooks.kubernetes.admission import admission_app
from planner.hooks.kubernetes.topology import Topology
from rfork.tracing import OFF, TraceContext, Tracer
from rfork.tracing.queue import LONGEST, Queue
from rfork.tracing.sdk import SdkTracer
from tests.unit.hooks.kubernetes.documents import PLANNER, hook, pod
from tests.unit.hooks.kubernetes.test_admission import BINDING, review
from tests.unit.tracing.spans import Kept

API_SERVER = TraceContext("1" * 32, "2" * 16)


async def post(
    tracer: Tracer, *bodies: object, path: str = "/mutate", caller: TraceContext | None = None
) -> list[int]:
    """The statuses of reviews, sent one after the other."""
    settings = hook()
    app = admission_app(settings, PLANNER, Topology(settings), CollectorRegistry(), tracer=tracer)
    headers = {} if caller is None else {"traceparent": caller.traceparent}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="https://webhook", headers=headers) as client:
        return [(await client.post(path, content=json.dumps(body))).status_code for body in bodies]


async def test_a_review_goes_on_with_the_trace_of_the_api_server() -> None:
    """By the names that OpenTelemetry has for what it is about."""
    kept = Kept()
    assert [200] == await post(kept.tracer, review(pod(), name="llama-0"), caller=API_SERVER)
    span, told = kept.spans["POST /mutate"], kept.attributes("POST /mutate")
    assert (API_SERVER.trace_id, "another process's") == (
        f"{span.context.trace_id:032x}",
        kept.parent("POST /mutate"),
    )
    assert ("serving", "llama-0", "injected", "POST", "/mutate", 200) == tuple(
        told[name]
        for name in (
            "k8s.namespace.name", "k8s.pod.name", "rfork.result", "http.request.method", "http.route",
            "http.response.status_code",
        )
    )  # fmt: skip
    assert "rfork.model" in told


async def test_what_is_no_review_is_a_span_too() -> None:
    """With its status, which is the caller's own fault."""
    kept = Kept()
    assert [400] == await post(kept.tracer, {"kind": "Pod"})
    told = kept.attributes("POST /mutate")
    assert ("malformed", 400, True) == (
        told["rfork.result"],
        told["http.response.status_code"],
        kept.spans["POST /mutate"].status.is_unset,
    )


async def test_bindings_and_what_is_not_traced_are_no_spans() -> None:
    """Bindings are those of all Pods of a cluster; a caller that traces asks for nothing where we do not."""
    kept = Kept()
    binding = {"metadata": {"name": "a"}, "target": {"name": "a"}}
    assert [200] == await post(kept.tracer, review(binding, kind=BINDING), path="/bind", caller=API_SERVER)
    assert [200] == await post(OFF, review(pod()), caller=API_SERVER)
    assert [] == kept.names


async def test_names_that_are_no_text_are_sent_all_the_same() -> None:
    """A collector takes UTF-8 alone: half a character would cost it all spans that go with this one."""
    kept = Kept()
    assert [200] == await post(kept.tracer, review(pod(), name="a\ud800b"))
    str(kept.attributes("POST /mutate")["k8s.pod.name"]).encode()


class Hangs(SpanExporter):
    """A collector that takes a request and never answers, until the test is over."""

    def __init__(self) -> None:
        self.asked, self.over = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.over.wait()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.over.set()


@pytest.fixture
def hangs() -> Iterator[Hangs]:
    exporter = Hangs()
    yield exporter
    exporter.over.set()


async def test_a_collector_that_hangs_holds_no_admission(hangs: Hangs) -> None:
    """While it holds a request, Pods are answered; what does not fit in the queue is dropped."""
    queue = Queue(hangs, "collector")
    tracer = SdkTracer(queue, "rfork-webhook")
    assert [200] == await post(tracer, review(pod()))
    hangs.asked.wait()
    for _ in range(LONGEST):
        tracer.begin("filler").end()
    assert [200, 200] == await post(tracer, review(pod()), review(pod()))
    assert queue.dropped >= 2
    hangs.over.set()
    tracer.close()
