"""The span queue: bounded, and dropped spans are counted."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from rfork.tracing import span_processor
from rfork.tracing.sdk import SdkTracer
from rfork.tracing.span_processor import BoundedSpanProcessor


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
    monkeypatch.setattr(span_processor, "CLOSE_S", 60.0)


def build_tracer(exporter: FakeSpanExporter) -> tuple[BoundedSpanProcessor, SdkTracer]:
    """Return a processor with this exporter, and a tracer that uses it."""
    processor = BoundedSpanProcessor(exporter, "collector:4318")
    return processor, SdkTracer(processor, "rfork-test")


def processor_logs(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages of the span processor."""
    return [record.getMessage() for record in caplog.records if record.name == span_processor.__name__]


def test_all_spans_are_sent_by_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Spans are sent in order; nothing is logged or dropped."""
    exporter = FakeSpanExporter()
    processor, tracer = build_tracer(exporter)
    for number in range(span_processor.MAX_BATCH + 3):
        tracer.start_span(str(number)).end()
    tracer.close()
    tracer.close()
    assert [str(number) for number in range(span_processor.MAX_BATCH + 3)] == exporter.names
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
    assert lines[0].startswith("dropping spans")
    assert "spans dropped in total spans=3 collector=collector:4318" == lines[-1]


def test_a_hanging_collector_blocks_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans beyond the queue are dropped immediately, and the remaining ones at the end."""
    monkeypatch.setattr(span_processor, "CLOSE_S", 0.01)
    exporter = FakeSpanExporter()
    exporter.may_proceed.clear()
    processor, tracer = build_tracer(exporter)
    tracer.start_span("hangs").end()
    assert exporter.export_started.wait(60)
    for number in range(span_processor.MAX_QUEUE + 5):
        tracer.start_span(str(number)).end()
    assert 5 == processor.dropped
    tracer.close()
    assert span_processor.MAX_QUEUE + 6 == processor.dropped
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
from tests.unit.tracing.test_span_processor import FakeSpanExporter, build_tracer
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
    assert not span_processor._filter_exporter_logs(own_record)
    assert span_processor._filter_exporter_logs(other_record)
