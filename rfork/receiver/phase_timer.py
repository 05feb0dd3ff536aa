"""Durations of the phases of a fork. Runs on the target."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rfork.tracing import NOOP_TRACER, Span, Tracer


class PhaseTimer:
    """Measures named phases. Each second counts for one phase: the innermost active one.

    Phases with the same name add up. Phases of several threads must be nested too; any thread may read them.
    """

    def __init__(self, tracer: Tracer = NOOP_TRACER) -> None:
        """With `tracer`, each phase is also a span."""
        self._tracer = tracer
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._ended: dict[str, float] = {}
        self._running: list[str] = []
        self._since = self.began  # when the innermost active phase began or resumed

    @property
    def seconds(self) -> float:
        """Seconds since the timer was created."""
        return time.monotonic() - self.began

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase so far, in the order in which they began; the active phase is last."""
        with self._lock:
            totals = dict(self._ended)
            if self._running:
                name = self._running[-1]
                totals[name] = totals.pop(name) + time.monotonic() - self._since
            return totals

    @contextmanager
    def phase(self, name: str) -> Iterator[Span]:
        """Time the `with` block as part of phase `name`."""
        with self._lock:
            self._record()
            if name not in self._ended:
                self._ended[name] = 0.0
                for around in self._running:  # nested phases are recorded before the enclosing one
                    self._ended[around] = self._ended.pop(around)
            self._running.append(name)
        try:
            with self._tracer.span(name) as span:
                yield span
        finally:
            with self._lock:
                self._record()
                self._running.pop()

    def _record(self) -> None:
        """Add the elapsed time to the active phase, if any; the caller holds the lock."""
        now = time.monotonic()
        if self._running:
            self._ended[self._running[-1]] += now - self._since
        self._since = now
