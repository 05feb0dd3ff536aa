"""Tracing of served channels, one span each in the reader's trace. Runs on the source."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from rfork.tracing import NO_SPAN, Span, Tracer


class ServingSpans:
    """Counts bytes served to forks, if tracing is enabled; `current_limit` returns the rate limit of all
    readers.

    Transports with reads that run no code here are not counted: their spans have no bytes. Thread-safe.
    """

    def __init__(self, tracer: Tracer, current_limit: Callable[[], int | None], instance_id: str = "") -> None:
        self._tracer = tracer
        self._instance_id = instance_id
        self._current_limit = current_limit
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()  # by fork, for those with a channel
        self._channels: Counter[str] = Counter()

    def begin(self, fork_id: str, transport: str, address: str) -> Span:
        """Record a channel opened for the reader at this IP address, which made the call."""
        if not self._tracer.enabled:
            return NO_SPAN
        with self._lock:
            self._channels[fork_id] += 1
        return self._tracer.start_span(
            "serve",
            kind="server",
            instance=self._instance_id,
            fork=fork_id,
            transport=transport,
            reader=address,
            rate_limit_bytes_per_s=self._current_limit(),
        )

    def add(self, fork_id: str, nbytes: int) -> None:
        """Record that `nbytes` bytes are about to be sent."""
        if self._tracer.enabled:
            with self._lock:
                if fork_id in self._channels:
                    self._bytes[fork_id] += nbytes

    def end(self, fork_id: str, span: Span) -> None:
        """End a channel's span. Concurrent channels of a fork each report what the fork received until then."""
        if not self._tracer.enabled:
            return
        with self._lock:
            nbytes = self._bytes[fork_id]
            self._channels[fork_id] -= 1
            if self._channels[fork_id] <= 0:
                del self._channels[fork_id], self._bytes[fork_id]
        span.set(bytes=nbytes or None, rate_limit_bytes_per_s=self._current_limit())
        span.end()
