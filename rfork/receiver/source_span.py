"""Trace span of the reads from one source. Runs on the target."""

from __future__ import annotations

import threading
import time

from rfork.errors import RforkError
from rfork.tracing import NO_SPAN, Span


class SourceSpan:
    """Lasts from the plan that names the source until the source is removed. Thread-safe."""

    def __init__(self, span: Span = NO_SPAN) -> None:
        self.span = span
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._chunks = self._bytes = 0

    def add_bytes(self, nbytes: int) -> None:
        """Count the bytes of a chunk that arrived, valid or not."""
        with self._lock:
            self._chunks += 1
            self._bytes += nbytes

    def fail(self, error: RforkError) -> None:
        """Record the error that ended the source."""
        self.span.event("failure", error_type=error.kind, detail=str(error), fault=error.fault)
        self.span.fail(error)

    def end(self, transport: str) -> None:
        """End the span. Safe to call twice."""
        with self._lock:
            chunks, nbytes = self._chunks, self._bytes
        seconds = max(time.monotonic() - self._began, 1e-9)
        self.span.set(transport=transport or None, chunks=chunks, bytes=nbytes, bytes_per_s=round(nbytes / seconds))
        self.span.end()
