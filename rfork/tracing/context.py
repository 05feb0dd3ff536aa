"""The current span of a thread or task, and its propagation to other processes.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import structlog

TRACEPARENT: Final = "traceparent"
"""Name of the header and of the gRPC metadata key."""
_SHAPE: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Reference to a span, with hexadecimal ids. `sampled`: it is sent to a collector."""

    trace_id: str
    span_id: str
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """The encoded context."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"

    @classmethod
    def parse(cls, text: str | bytes | None) -> TraceContext | None:
        """Decode a context; return None if it is invalid."""
        if text is None:
            return None
        if isinstance(text, bytes):
            text = text.decode("latin-1")
        found = _SHAPE.fullmatch(text)
        if found is None or (text.startswith("00") and found[4]):
            return None
        if not int(found[1], 16) or not int(found[2], 16):
            return None
        return cls(found[1], found[2], bool(int(found[3], 16) & _SAMPLED))


_here: ContextVar[TraceContext | None] = ContextVar("rfork_trace", default=None)


def current_context() -> TraceContext | None:
    """Return the context of this thread or task."""
    return _here.get()


def inject() -> dict[str, str]:
    """Return the headers that propagate the current trace; empty without tracing."""
    context = _here.get()
    return {} if context is None else {TRACEPARENT: context.traceparent}


@contextmanager
def use_context(context: TraceContext | None) -> Iterator[None]:
    """Make `context` current for this thread or task inside the block, and add its `trace_id` to log lines.

    Other threads do not inherit it: pass `current_context` on. None changes nothing.
    """
    if context is None:
        yield
        return
    token = _here.set(context)
    bound = structlog.contextvars.bind_contextvars(trace_id=context.trace_id)
    try:
        yield
    finally:
        structlog.contextvars.reset_contextvars(**bound)
        _here.reset(token)
