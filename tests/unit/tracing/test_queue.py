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

from rfork.tracing import queue
from rfork.tracing.queue import Queue
from rfork.tracing.sdk import SdkTracer


class Exporter(SpanExporter):
    """Keeps names; fails, raises, or waits until it may go on."""

    def __init__(self, result: SpanExportResult | Exception = SpanExportResult.SUCCESS) -> None:
        self.names: list[str] = []
        self.result = result
        self.may_go_on = threading.Event()
        self.began = threading.Event()
        self.may_go_on.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.began.set()
        self.may_go_on.wait()
        if isinstance(self.result, Exception):
            raise self.result
        self.names += [span.name for span in spans]
        return self.result


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be sent is sent by the end, however busy the machine."""
    monkeypatch.setattr(queue, "CLOSE_S", 60.0)


def traced(exporter: Exporter) -> tuple[Queue, SdkTracer]:
    """A tracer whose spans go to the exporter by the queue."""
    waiting = Queue(exporter, "collector:4318")
    return waiting, SdkTracer(waiting, "rfork-test")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of spans."""
    return [record.getMessage() for record in caplog.records if record.name == queue.__name__]


def test_all_spans_are_sent_by_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """In order; nothing is said of it, and none is dropped."""
    exporter = Exporter()
    waiting, tracer = traced(exporter)
    for number in range(queue.BATCH + 3):
        tracer.begin(str(number)).end()
    tracer.close()
    tracer.close()
    assert ([str(number) for number in range(queue.BATCH + 3)], 0, []) == (
        exporter.names, waiting.dropped, told(caplog),
    )  # fmt: skip


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("broken")])
def test_a_collector_that_is_away_is_told_of_once(
    result: SpanExportResult | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """And at the end how many spans it cost."""
    waiting, tracer = traced(Exporter(result))
    for number in range(3):
        tracer.begin(str(number)).end()
        assert waiting.force_flush()
    tracer.close()
    lines = told(caplog)
    assert (3, 2, True, "spans were dropped spans=3 collector=collector:4318") == (
        waiting.dropped, len(lines), lines[0].startswith("spans are dropped"), lines[-1],
    )  # fmt: skip


def test_a_collector_that_hangs_holds_up_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit in the queue is dropped at once; at the end the rest, too."""
    monkeypatch.setattr(queue, "CLOSE_S", 0.01)
    exporter = Exporter()
    exporter.may_go_on.clear()
    waiting, tracer = traced(exporter)
    tracer.begin("hangs").end()
    assert exporter.began.wait(60)
    for number in range(queue.LONGEST + 5):
        tracer.begin(str(number)).end()
    before = waiting.dropped
    tracer.close()
    after = waiting.dropped
    exporter.may_go_on.set()
    tracer.begin("late").end()
    assert (5, queue.LONGEST + 6, 2) == (before, after, len(told(caplog)))


def test_a_process_that_gets_no_thread_only_loses_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends a span does not notice."""

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    waiting, tracer = traced(Exporter())
    monkeypatch.setattr(threading.Thread, "start", none_left)
    tracer.begin("fork").end()
    tracer.close()
    assert 1 == waiting.dropped


FORKS = """
import os, signal, threading, time
from tests.unit.tracing.test_queue import Exporter, traced
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
    assert [False, True] == [queue._quiet(record) for record in words]
