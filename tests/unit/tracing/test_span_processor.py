"""Spans on their way: kept in bounds, dropped and counted where nobody takes them."""

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
    """Keeps names; fails, raises, or waits until it may go on."""

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
    """What can be sent is sent by the end, however busy the machine."""
    monkeypatch.setattr(span_processor, "CLOSE_S", 60.0)


def build_tracer(exporter: FakeSpanExporter) -> tuple[BoundedSpanProcessor, SdkTracer]:
    """A tracer whose spans go to the exporter by the queue."""
    processor = BoundedSpanProcessor(exporter, "collector:4318")
    return processor, SdkTracer(processor, "rfork-test")


def processor_logs(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of spans."""
    return [record.getMessage() for record in caplog.records if record.name == span_processor.__name__]


def test_all_spans_are_sent_by_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """In order; nothing is said of it, and none is dropped."""
    exporter = FakeSpanExporter()
    processor, tracer = build_tracer(exporter)
    for number in range(span_processor.BATCH + 3):
        tracer.start_span(str(number)).end()
    tracer.close()
    tracer.close()
    assert ([str(number) for number in range(span_processor.BATCH + 3)], 0, []) == (
        exporter.names, processor.dropped, processor_logs(caplog),
    )  # fmt: skip


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("broken")])
def test_a_collector_that_is_away_is_told_of_once(
    result: SpanExportResult | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """And at the end how many spans it cost."""
    processor, tracer = build_tracer(FakeSpanExporter(result))
    for number in range(3):
        tracer.start_span(str(number)).end()
        assert processor.force_flush()
    tracer.close()
    lines = processor_logs(caplog)
    assert (3, 2, True, "spans were dropped spans=3 collector=collector:4318") == (
        processor.dropped, len(lines), lines[0].startswith("spans are dropped"), lines[-1],
    )  # fmt: skip


def test_a_collector_that_hangs_holds_up_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit in the queue is dropped at once; at the end the rest, too."""
    monkeypatch.setattr(span_processor, "CLOSE_S", 0.01)
    exporter = FakeSpanExporter()
    exporter.may_proceed.clear()
    processor, tracer = build_tracer(exporter)
    tracer.start_span("hangs").end()
    assert exporter.export_started.wait(60)
    for number in range(span_processor.MAX_QUEUE + 5):
        tracer.start_span(str(number)).end()
    before = processor.dropped
    tracer.close()
    after = processor.dropped
    exporter.may_proceed.set()
    tracer.start_span("late").end()
    assert (5, span_processor.MAX_QUEUE + 6, 2) == (before, after, len(processor_logs(caplog)))


def test_a_process_that_gets_no_thread_only_loses_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends a span does not notice."""

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    processor, tracer = build_tracer(FakeSpanExporter())
    monkeypatch.setattr(threading.Thread, "start", none_left)
    tracer.start_span("fork").end()
    tracer.close()
    assert 1 == processor.dropped


FORKS = """
import os, signal, threading, time
from tests.unit.tracing.test_span_processor import Exporter, traced
exporter = Exporter()
waiting, tracer = traced(exporter)
tracer.begin("parent").end()
assert waiting.force_flush()
held, done = threading.Event(), threading.Event()
def hold():
    with waiting._changed:
        held.set()
        done.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(30)  # ends it where it would wait for ever
    tracer.begin("child").end()
    sent = waiting.force_flush()
    os._exit(0 if sent and exporter.names == ["parent", "child"] else 1)
done.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_child_of_a_process_sends_its_own_spans() -> None:
    """Though it has no thread that sends, and its parent held the lock when it was made."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "0\n" == done.stdout


def test_only_what_is_said_of_our_own_sending_is_kept_quiet() -> None:
    """An engine that sends spans itself goes on to say how that goes."""
    words = logging.makeLogRecord({"threadName": "rfork-spans"}), logging.makeLogRecord({"threadName": "x"})
    assert [False, True] == [span_processor._filter_exporter_logs(record) for record in words]
