"""Sends spans to a collector: a bounded queue, and the thread that empties it.

OpenTelemetry's own batch processor blocks the exit of a process if the collector hangs, and does not count
dropped spans.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from rfork.logs import logger

MAX_QUEUE: Final = 4096
"""Maximum number of queued spans: a fork of a hundred sources creates about two hundred."""
MAX_BATCH: Final = 512
"""Maximum number of spans per request."""
MAX_DELAY_S: Final = 0.5
"""Maximum delay of a span before it is sent with others."""
CLOSE_S: Final = 1.0
"""Maximum seconds for which the exit of a process waits for the collector."""

log = logger(__name__)


class BoundedSpanProcessor(SpanProcessor):
    """Sends finished spans to `exporter`; never blocks the thread that ends a span."""

    def __init__(self, exporter: SpanExporter, collector: str) -> None:
        """`collector`: its URL, for the log."""
        self._exporter = exporter
        self._collector = collector
        self._changed = threading.Condition()
        self._queue: deque[ReadableSpan] = deque()
        self._sending = 0
        self._closing = self._drops_counted = False
        self._dropped = 0
        self._thread: threading.Thread | None = None
        own = weakref.ref(self)

        def reset_after_fork() -> None:
            if (processor := own()) is not None:
                processor._reset_after_fork()

        os.register_at_fork(after_in_child=reset_after_fork)

    @property
    def dropped(self) -> int:
        """Number of spans known not to have reached the collector."""
        with self._changed:
            return self._dropped

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor.on_end`."""
        if not span.context.trace_flags.sampled:
            return
        with self._changed:
            if self._closing or len(self._queue) >= MAX_QUEUE or not self._ensure_thread():
                first = self._drop(1)
            else:
                first = False
                self._queue.append(span)
                self._changed.notify_all()
        self._log_drops(first, "the collector is too slow")

    def shutdown(self) -> None:
        """Send queued spans within `CLOSE_S`, and log the number of dropped ones. Safe to call twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)
        with self._changed:
            self._drop(len(self._queue) + self._sending)
            self._drops_counted = True  # ignore later results of the thread, which may still run
            self._queue.clear()
            dropped = self._dropped
        if dropped:
            log.warning("tracing spans dropped in total", spans=dropped, collector=self._collector)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until all finished spans were sent or dropped; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._sending), timeout_millis / 1000)

    def _reset_after_fork(self) -> None:
        """Reset the child of an `os.fork`, which has no thread, and where the lock may be locked forever."""
        self._changed = threading.Condition()
        self._queue.clear()  # the parent sends them
        self._sending = self._dropped = 0
        self._thread = None

    def _ensure_thread(self) -> bool:
        """Start the thread with the first span; return whether it exists."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="rfork-spans", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # thread limit reached, or the interpreter is exiting
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        for name in _EXPORTER_LOGGERS:
            logging.getLogger(name).addFilter(_filter_exporter_logs)
        while batch := self._next():
            reason = self._send(batch)
            with self._changed:
                self._sending = 0
                first = bool(reason) and not self._drops_counted and self._drop(len(batch))
                self._changed.notify_all()
            self._log_drops(first, reason)

    def _next(self) -> list[ReadableSpan]:
        """Return the next spans to send; empty when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._changed.wait_for(lambda: len(self._queue) >= MAX_BATCH or self._closing, MAX_DELAY_S)
            batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            self._sending = len(batch)
            return batch

    def _send(self, batch: Sequence[ReadableSpan]) -> str:
        """Send spans. Return the reason if that failed, else an empty text."""
        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # exporters may raise anything, and later spans must still be sent
            return f"{type(error).__name__}: {error}"
        return "" if sent else "the collector rejected the spans"

    def _drop(self, spans: int) -> bool:
        """Count dropped spans; return whether these are the first. Called with the lock."""
        first = not self._dropped and bool(spans)
        self._dropped += spans
        return first

    def _log_drops(self, first: bool, reason: str) -> None:
        if first:
            log.warning("dropping tracing spans", collector=self._collector, reason=reason)


_EXPORTER_LOGGERS: Final[Iterable[str]] = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "urllib3.connectionpool",
)


def _filter_exporter_logs(record: logging.LogRecord) -> bool:
    """Suppress the exporter's log of each failure, logged once here; keep those of other exporters."""
    return record.threadName != "rfork-spans"
