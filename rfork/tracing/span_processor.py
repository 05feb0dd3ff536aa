"""Spans on their way to a collector: a queue of bounded length, and the thread that empties it.

OpenTelemetry's own batches wait for a collector that hangs when a process ends, and do not say how much
they dropped.
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
"""Spans that wait: a fork of a hundred sources makes about two hundred."""
BATCH: Final = 512
"""Most spans of one request."""
GATHER_S: Final = 0.5
"""How long spans wait for others."""
CLOSE_S: Final = 1.0
"""Most seconds that the end of a process waits for a collector."""

log = logger(__name__)


class BoundedSpanProcessor(SpanProcessor):
    """Hands spans that have ended to `exporter`; never blocks those that end them."""

    def __init__(self, exporter: SpanExporter, collector: str) -> None:
        """`collector` is its URL, for the log."""
        self._exporter = exporter
        self._collector = collector
        self._changed = threading.Condition()
        self._waiting: deque[ReadableSpan] = deque()
        self._sending = 0
        self._closing = self._counted = False
        self._dropped = 0
        self._thread: threading.Thread | None = None
        own = weakref.ref(self)

        def reset_after_fork() -> None:
            if (queue := own()) is not None:
                queue._reset_after_fork()

        os.register_at_fork(after_in_child=reset_after_fork)

    @property
    def dropped(self) -> int:
        """How many spans never came to the collector, as far as is known."""
        with self._changed:
            return self._dropped

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor.on_end`."""
        if not span.context.trace_flags.sampled:
            return
        with self._changed:
            if self._closing or len(self._waiting) >= MAX_QUEUE or not self._runs():
                first = self._drop(1)
            else:
                first = False
                self._waiting.append(span)
                self._changed.notify_all()
        self._log_drops(first, "it does not take them as fast as they come")

    def shutdown(self) -> None:
        """Send what waits, within `CLOSE_S`, and say how much was dropped. Safe to call twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)
        with self._changed:
            self._drop(len(self._waiting) + self._sending)
            self._counted = True  # whatever the thread, which is left behind, still gets done
            self._waiting.clear()
            dropped = self._dropped
        if dropped:
            log.warning("spans were dropped", spans=dropped, collector=self._collector)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until all that ended so far was sent, or dropped; whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._sending), timeout_millis / 1000)

    def _reset_after_fork(self) -> None:
        """In the child of an `os.fork`, which has no thread, and where the lock may be held for ever."""
        self._changed = threading.Condition()
        self._waiting.clear()  # the parent sends them
        self._sending = self._dropped = 0
        self._thread = None

    def _runs(self) -> bool:
        """Whether there is a thread: made with the first span."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="rfork-spans", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this process may have no more threads, or is ending
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        for chatty in _LOUD:
            logging.getLogger(chatty).addFilter(_filter_exporter_logs)
        while batch := self._next():
            why = self._send(batch)
            with self._changed:
                self._sending = 0
                first = bool(why) and not self._counted and self._drop(len(batch))
                self._changed.notify_all()
            self._log_drops(first, why)

    def _next(self) -> list[ReadableSpan]:
        """The next spans to send; none: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(lambda: len(self._waiting) >= BATCH or self._closing, GATHER_S)
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            self._sending = len(batch)
            return batch

    def _send(self, batch: Sequence[ReadableSpan]) -> str:
        """Why these were not sent; empty: they were."""
        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # whatever an exporter raises: the next spans have to go all the same
            return f"{type(error).__name__}: {error}"
        return "" if sent else "it did not take them"

    def _drop(self, spans: int) -> bool:
        """Whether these are the first. Under the lock."""
        first = not self._dropped and bool(spans)
        self._dropped += spans
        return first

    def _log_drops(self, first: bool, why: str) -> None:
        if first:
            log.warning("spans are dropped", collector=self._collector, because=why)


_LOUD: Final[Iterable[str]] = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "urllib3.connectionpool",
)


def _filter_exporter_logs(record: logging.LogRecord) -> bool:
    """What an exporter says of each failure is said here once; that of others' exporters stays."""
    return record.threadName != "rfork-spans"
