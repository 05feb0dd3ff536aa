"""Spans as OpenTelemetry's SDK makes them, and none where nothing is traced."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter

from rfork.errors import MissingExtra, SettingsError
from rfork.settings import TracingSettings
from rfork.tracing import NO_SPAN, NOOP_TRACER, TraceContext, current_context, get_tracer, sdk, span_processor
from rfork.tracing.sdk import sending_tracer
from tests.unit.tracing.span_recorder import SpanRecorder

PARENT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def test_a_span_within_another_belongs_to_it() -> None:
    """And to its trace; what has no name of OpenTelemetry's is rfork's own; None is left out."""
    recorder = SpanRecorder()
    with recorder.tracer.span("fork", model="m", reasons=(), fallback=None):
        with recorder.tracer.span("transfer", kind="client", status=200) as span:
            span.set(bytes=5)
        detached_span = recorder.tracer.start_span("read")
    detached_span.end()
    detached_span.end()
    assert (["transfer", "fork", "read"], None, "fork", "fork") == (
        recorder.names,
        recorder.parent("fork"),
        recorder.parent("transfer"),
        recorder.parent("read"),
    )
    assert (
        {"rfork.model": "m", "rfork.reasons": ()},
        {"http.response.status_code": 200, "rfork.bytes": 5},
    ) == (
        recorder.attributes("fork"),
        recorder.attributes("transfer"),
    )
    assert (None, 1) == (current_context(), len({span.context.trace_id for span in recorder.spans.values()}))


def test_a_span_goes_on_with_the_trace_of_another_process() -> None:
    """With the links it is given, to whichever traces."""
    recorder, other = SpanRecorder(), TraceContext("1" * 32, "2" * 16)
    with recorder.tracer.span("answer", parent=PARENT, links=[other, None], kind="server") as span:
        span_context = span.context
    made = recorder.spans["answer"]
    assert made.parent is not None
    assert (PARENT.trace_id, f"{made.parent.span_id:016x}", [int("1" * 32, 16)]) == (
        span_context.trace_id if span_context else None,
        PARENT.span_id,
        [link.context.trace_id for link in made.links],
    )


def test_what_raises_fails_its_span() -> None:
    """With the error's kind; one that ended is not changed any more."""
    recorder = SpanRecorder()
    with pytest.raises(ValueError, match="no"), recorder.tracer.span("fork") as span:
        raise ValueError("no")
    span.fail("too late")
    span.event("too late")
    made = recorder.spans["fork"]
    assert (StatusCode.ERROR, "ValueError: no", {"error.type": "ValueError"}, ()) == (
        made.status.status_code,
        made.status.description,
        recorder.attributes("fork"),
        tuple(made.events),
    )


@pytest.mark.parametrize(
    ("sample_ratio", "parent", "sent"),
    [(0.0, None, False), (0.0, PARENT, True), (1.0, TraceContext("1" * 32, "2" * 16, sampled=False), False)],
    ids=["none of ours", "its caller sends it", "its caller does not"],
)
def test_a_share_is_of_the_traces_that_begin_here(sample_ratio: float, parent: TraceContext | None, sent: bool) -> None:
    """What came with a call is sent if its caller sends it."""
    recorder = SpanRecorder(sample_ratio)
    with recorder.tracer.span("fork", parent=parent) as span:
        context = span.context
        span.set(model="m")
        span.event("something")
        span.fail("anything")
    assert (sent, sent) == (bool(recorder.names), context is not None and context.sampled)


def test_a_trace_that_begins_in_an_engine_links_to_the_engines_own() -> None:
    """Its tracer, and the span it works for, stay its own."""
    recorder, engine = SpanRecorder(), TracerProvider().get_tracer("engine")
    with engine.start_as_current_span("start up") as theirs, recorder.tracer.span("fork"):
        recorder.tracer.start_span("transfer").end()
    links = {name: [link.context.span_id for link in span.links] for name, span in recorder.spans.items()}
    expected = {"fork": [theirs.get_span_context().span_id], "transfer": []}
    assert (expected, None) == (links, recorder.parent("fork"))


def test_nothing_is_made_where_nothing_is_traced() -> None:
    """Not even a context manager."""
    with NOOP_TRACER.span("fork", model="m") as span:
        span.set(bytes=1)
        span.event("something", chunk=1)
        span.fail("anything")
        span.end()
    assert (False, True, True, None, None) == (
        NOOP_TRACER.enabled, NOOP_TRACER.start_span("read") is NO_SPAN, span is NO_SPAN, span.context, current_context(),
    )  # fmt: skip


def test_a_process_that_does_not_trace_imports_no_opentelemetry() -> None:
    """Its own, that is: FastAPI imports the interface for itself."""
    code = (
        "import sys; from rfork.tracing import OFF, tracer; "
        "print(tracer() is OFF, [name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert "True []\n" == done.stdout


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    """Before anything is traced."""
    with pytest.raises(SettingsError, match="RFORK_TRACING_ENDPOINT"):
        sending_tracer(endpoint, TracingSettings(), "rfork-test")


def test_headers_that_are_none_are_refused_and_not_told() -> None:
    """They hold secrets."""
    chosen = TracingSettings.model_validate({"headers": "hunter2"})
    with pytest.raises(SettingsError) as refused:
        sending_tracer("http://127.0.0.1:1", chosen, "rfork-test")
    assert "hunter2" not in str(refused.value)


class CapturingAdapter(HTTPAdapter):
    """Takes every request, and keeps what it was sent with."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[dict[str, str]] = []

    def send(self, request: PreparedRequest, *_: object, **__: object) -> Response:
        self.headers.append({name.lower(): str(value) for name, value in request.headers.items()})
        response = Response()
        response.status_code = 200
        return response


@pytest.mark.parametrize(("configured_headers", "expected"), [(None, None), ("authorization=ours", "ours")])
def test_what_the_engine_tells_its_collector_is_not_told_to_ours(
    configured_headers: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_* is about the engine's: its credentials, its headers, how it compresses."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=engine-secret,x-engine=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    collector = CapturingAdapter()
    monkeypatch.setattr(sdk._Session, "get_adapter", lambda session, url: collector)
    monkeypatch.setattr(span_processor, "CLOSE_S", 60.0)  # on a busy machine
    chosen = TracingSettings.model_validate({"headers": configured_headers})
    tracer = sending_tracer("http://127.0.0.1:1", chosen, "rfork-test")
    tracer.start_span("fork").end()
    tracer.close()
    (sent,) = collector.headers
    assert (expected, None, None) == tuple(sent.get(name) for name in ("authorization", "x-engine", "content-encoding"))


def test_where_the_sdk_is_switched_off_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SDK_DISABLED: there is no span that others could refer to."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    recorder = SpanRecorder()
    with recorder.tracer.span("fork") as span:
        contexts = span.context, current_context()
    assert ((None, None), []) == (contexts, recorder.names)


def test_without_its_packages_tracing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is asked for; where it is not, nobody misses them."""
    monkeypatch.setitem(sys.modules, "rfork.tracing.sdk", None)
    monkeypatch.setenv("RFORK_TRACING_ENDPOINT", "http://127.0.0.1:4318")
    with pytest.raises(MissingExtra) as missing:
        get_tracer("rfork-nothing")
    assert "pip install 'rfork[tracing]'" == missing.value.hint
