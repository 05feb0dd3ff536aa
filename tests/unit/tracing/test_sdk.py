"""Spans of OpenTelemetry's SDK, and no spans without tracing."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter

from rfork.errors import MissingExtra, SettingsError
from rfork.settings import TracingSettings
from rfork.tracing import NO_SPAN, NOOP_TRACER, TraceContext, current_context, get_tracer, sdk
from rfork.tracing.sdk import BoundedSpanProcessor, SdkTracer, otlp_tracer
from tests.unit.tracing.span_recorder import SpanRecorder


class FakeSpanExporter(SpanExporter):
    """Keeps the names of spans; can fail, raise, or block."""

    def __init__(self, result: SpanExportResult | Exception = SpanExportResult.SUCCESS) -> None:
        self.names: list[str] = []
        self.result = result
        self.may_proceed = threading.Event()
        self.export_started = threading.Event()
        self.may_proceed.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.export_started.set()
        self.may_proceed.wait()
        if isinstance(self.result, Exception):
            raise self.result
        self.names += [span.name for span in spans]
        return self.result


@pytest.fixture(autouse=True)
def long_close_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a slow machine enough time to send all spans at the end."""
    monkeypatch.setattr(sdk, "CLOSE_S", 60.0)


def build_tracer(exporter: FakeSpanExporter) -> tuple[BoundedSpanProcessor, SdkTracer]:
    """Return a processor with this exporter, and a tracer that uses it."""
    processor = BoundedSpanProcessor(exporter, "collector:4318")
    return processor, SdkTracer(processor, "rfork-test")


def processor_logs(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages of the span processor."""
    return [record.getMessage() for record in caplog.records if record.name == sdk.__name__]


def test_all_spans_are_sent_by_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Spans are sent in order; nothing is logged or dropped."""
    exporter = FakeSpanExporter()
    processor, tracer = build_tracer(exporter)
    for number in range(sdk.MAX_BATCH + 3):
        tracer.start_span(str(number)).end()
    tracer.close()
    tracer.close()
    assert [str(number) for number in range(sdk.MAX_BATCH + 3)] == exporter.names
    assert 0 == processor.dropped
    assert [] == processor_logs(caplog)


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("broken")])
def test_an_unreachable_collector_is_logged_once(
    result: SpanExportResult | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Another line at the end has the number of dropped spans."""
    processor, tracer = build_tracer(FakeSpanExporter(result))
    for number in range(3):
        tracer.start_span(str(number)).end()
        assert processor.force_flush()
    tracer.close()
    lines = processor_logs(caplog)
    assert 3 == processor.dropped
    assert 2 == len(lines)
    assert lines[0].startswith("dropping tracing spans")
    assert "tracing spans dropped in total spans=3 collector=collector:4318" == lines[-1]


def test_a_hanging_collector_blocks_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans beyond the queue are dropped immediately, and the remaining ones at the end."""
    monkeypatch.setattr(sdk, "CLOSE_S", 0.01)
    exporter = FakeSpanExporter()
    exporter.may_proceed.clear()
    processor, tracer = build_tracer(exporter)
    tracer.start_span("hangs").end()
    assert exporter.export_started.wait(60)
    for number in range(sdk.MAX_QUEUE + 5):
        tracer.start_span(str(number)).end()
    assert 5 == processor.dropped
    tracer.close()
    assert sdk.MAX_QUEUE + 6 == processor.dropped
    exporter.may_proceed.set()
    tracer.start_span("late").end()
    assert 2 == len(processor_logs(caplog))


def test_a_process_without_threads_loses_only_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a span does not raise if no thread can be started."""

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    processor, tracer = build_tracer(FakeSpanExporter())
    monkeypatch.setattr(threading.Thread, "start", none_left)
    tracer.start_span("fork").end()
    tracer.close()
    assert 1 == processor.dropped


FORK_SCRIPT = """
import os, signal, threading, time
from tests.unit.tracing.test_sdk import FakeSpanExporter, build_tracer
exporter = FakeSpanExporter()
processor, tracer = build_tracer(exporter)
tracer.start_span("parent").end()
assert processor.force_flush()
locked, done = threading.Event(), threading.Event()
def hold_lock():
    with processor._changed:
        locked.set()
        done.wait()
threading.Thread(target=hold_lock).start()
locked.wait()
child = os.fork()
if not child:
    signal.alarm(30)  # kills the child if it hangs
    tracer.start_span("child").end()
    sent = processor.force_flush()
    os._exit(0 if sent and exporter.names == ["parent", "child"] else 1)
done.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_child_of_an_os_fork_sends_its_own_spans() -> None:
    """The child sends its spans although it has no thread and the parent was holding the lock."""
    command = [sys.executable, "-W", "ignore", "-c", FORK_SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "0\n" == done.stdout


def test_only_logs_of_our_own_exporter_are_suppressed() -> None:
    """The exporter of an engine keeps logging."""
    own_record = logging.makeLogRecord({"threadName": "rfork-spans"})
    other_record = logging.makeLogRecord({"threadName": "x"})
    assert not sdk._filter_exporter_logs(own_record)
    assert sdk._filter_exporter_logs(other_record)


PARENT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def test_a_nested_span_belongs_to_the_outer_one() -> None:
    """Both spans share a trace. Attributes without a standard name get the prefix rfork; None is omitted."""
    recorder = SpanRecorder()
    with recorder.tracer.span("fork", model="m", reasons=(), fallback=None):
        with recorder.tracer.span("transfer", kind="client", status=200) as span:
            span.set(bytes=5)
        detached_span = recorder.tracer.start_span("read")
    detached_span.end()
    detached_span.end()
    assert ["transfer", "fork", "read"] == recorder.names
    assert recorder.parent("fork") is None
    assert "fork" == recorder.parent("transfer")
    assert "fork" == recorder.parent("read")
    assert {"rfork.model": "m", "rfork.reasons": ()} == recorder.attributes("fork")
    assert {"http.response.status_code": 200, "rfork.bytes": 5} == recorder.attributes("transfer")
    assert current_context() is None
    assert 1 == len({span.context.trace_id for span in recorder.spans.values()})


def test_a_span_continues_the_trace_of_another_process() -> None:
    """Its links may refer to other traces."""
    recorder, other = SpanRecorder(), TraceContext("1" * 32, "2" * 16)
    with recorder.tracer.span("answer", parent=PARENT, links=[other, None], kind="server") as span:
        span_context = span.context
    made = recorder.spans["answer"]
    assert made.parent is not None
    assert PARENT.trace_id == (span_context.trace_id if span_context else None)
    assert f"{made.parent.span_id:016x}" == PARENT.span_id
    assert [int("1" * 32, 16)] == [link.context.trace_id for link in made.links]


def test_an_exception_fails_the_span() -> None:
    """The span records the type of the error, and does not change after its end."""
    recorder = SpanRecorder()
    with pytest.raises(ValueError, match="no"), recorder.tracer.span("fork") as span:
        raise ValueError("no")
    span.fail("too late")
    span.event("too late")
    made = recorder.spans["fork"]
    assert StatusCode.ERROR == made.status.status_code
    assert "ValueError: no" == made.status.description
    assert {"error.type": "ValueError"} == recorder.attributes("fork")
    assert () == tuple(made.events)


@pytest.mark.parametrize(
    ("sample_ratio", "parent", "sent"),
    [(0.0, None, False), (0.0, PARENT, True), (1.0, TraceContext("1" * 32, "2" * 16, sampled=False), False)],
    ids=["no parent", "sampled parent", "unsampled parent"],
)
def test_the_ratio_applies_to_new_traces(sample_ratio: float, parent: TraceContext | None, sent: bool) -> None:
    """A trace continued from a caller is sent if the caller sends it."""
    recorder = SpanRecorder(sample_ratio)
    with recorder.tracer.span("fork", parent=parent) as span:
        context = span.context
        span.set(model="m")
        span.event("something")
        span.fail("anything")
    assert sent == bool(recorder.names)
    assert sent == (context is not None and context.sampled)


def test_a_trace_that_begins_in_an_engine_links_to_the_engines_span() -> None:
    """The engine's tracer and current span stay unchanged."""
    recorder, engine = SpanRecorder(), TracerProvider().get_tracer("engine")
    with engine.start_as_current_span("start up") as theirs, recorder.tracer.span("fork"):
        recorder.tracer.start_span("transfer").end()
    links = {name: [link.context.span_id for link in span.links] for name, span in recorder.spans.items()}
    expected = {"fork": [theirs.get_span_context().span_id], "transfer": []}
    assert expected == links
    assert recorder.parent("fork") is None


def test_the_noop_tracer_creates_nothing() -> None:
    """It does not even create context managers."""
    with NOOP_TRACER.span("fork", model="m") as span:
        span.set(bytes=1)
        span.event("something", chunk=1)
        span.fail("anything")
        span.end()
    assert not NOOP_TRACER.enabled
    assert NOOP_TRACER.start_span("read") is NO_SPAN
    assert span is NO_SPAN
    assert span.context is None
    assert current_context() is None


def test_a_process_without_tracing_does_not_import_opentelemetry() -> None:
    """rfork itself does not import it, although FastAPI may."""
    code = (
        "import sys; from rfork.tracing import NOOP_TRACER, get_tracer; "
        "print(get_tracer() is NOOP_TRACER, [name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert "True []\n" == done.stdout


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://"])
def test_an_invalid_endpoint_is_rejected(endpoint: str) -> None:
    """The error is raised before any span is created."""
    with pytest.raises(SettingsError, match="RFORK_TRACING_ENDPOINT"):
        otlp_tracer(endpoint, TracingSettings(), "rfork-test")


def test_invalid_headers_are_rejected_without_their_values() -> None:
    """The error does not contain the headers, which are secrets."""
    chosen = TracingSettings.model_validate({"headers": "hunter2"})
    with pytest.raises(SettingsError) as refused:
        otlp_tracer("http://127.0.0.1:1", chosen, "rfork-test")
    assert "hunter2" not in str(refused.value)


class CapturingAdapter(HTTPAdapter):
    """Accepts every request and keeps its headers."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[dict[str, str]] = []

    def send(self, request: PreparedRequest, *_: object, **__: object) -> Response:
        self.headers.append({name.lower(): str(value) for name, value in request.headers.items()})
        response = Response()
        response.status_code = 200
        return response


@pytest.mark.parametrize(("configured_headers", "expected"), [(None, None), ("authorization=ours", "ours")])
def test_the_engines_exporter_settings_do_not_apply(
    configured_headers: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_* credentials, headers and compression are for the engine's collector."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=engine-secret,x-engine=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    collector = CapturingAdapter()
    monkeypatch.setattr(sdk._Session, "get_adapter", lambda session, url: collector)
    monkeypatch.setattr(sdk, "CLOSE_S", 60.0)  # for a busy machine
    chosen = TracingSettings.model_validate({"headers": configured_headers})
    tracer = otlp_tracer("http://127.0.0.1:1", chosen, "rfork-test")
    tracer.start_span("fork").end()
    tracer.close()
    (sent,) = collector.headers
    assert expected == sent.get("authorization")
    assert sent.get("x-engine") is None
    assert sent.get("content-encoding") is None


def test_a_disabled_sdk_disables_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With OTEL_SDK_DISABLED spans have no context."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    recorder = SpanRecorder()
    with recorder.tracer.span("fork") as span:
        assert span.context is None
        assert current_context() is None
    assert [] == recorder.names


def test_tracing_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages are required only if tracing is enabled."""
    monkeypatch.setitem(sys.modules, "rfork.tracing.sdk", None)
    monkeypatch.setenv("RFORK_TRACING_ENDPOINT", "http://127.0.0.1:4318")
    with pytest.raises(MissingExtra) as missing:
        get_tracer("rfork-nothing")
    assert "pip install 'rfork[tracing]'" == missing.value.hint
