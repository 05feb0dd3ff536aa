"""What is read from one source, as one span of the fork's trace. Runs on the target."""

from __future__ import annotations

import threading
import time

from rfork.errors import RforkError
from rfork.tracing import NO_SPAN, Span


class SourceSpan:
    """Lasts from when the plan named the source until it is given up or done with. Thread-safe."""

    def __init__(self, span: Span = NO_SPAN) -> None:
        self.span = span
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._chunks = self._bytes = 0

    def add_bytes(self, nbytes: int) -> None:
        """A chunk of so many bytes arrived, right or wrong."""
        with self._lock:
            self._chunks += 1
            self._bytes += nbytes

    def fail(self, error: RforkError) -> None:
        """The source failed the fork so, or this side did."""
        self.span.event("failure", error_type=error.kind, detail=str(error), fault=error.fault)
        self.span.fail(error)

    def end(self, transport: str) -> None:
        """Nothing more is read. Safe to call twice."""
        with self._lock:
            chunks, nbytes = self._chunks, self._bytes
        seconds = max(time.monotonic() - self._began, 1e-9)
        self.span.set(transport=transport or None, chunks=chunks, bytes=nbytes, bytes_per_s=round(nbytes / seconds))
        self.span.end()
