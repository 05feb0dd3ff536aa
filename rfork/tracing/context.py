"""Which span a thread, or a task, works for, and how that is told to another process.

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
"""The header, and the key of gRPC metadata."""
_SHAPE: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span, as others refer to it; ids in hexadecimal. `sampled`: it is sent to a collector."""

    trace_id: str
    span_id: str
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """The text that tells it."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"

    @classmethod
    def parse(cls, text: str | bytes | None) -> TraceContext | None:
        """The span that such a text tells; None where it tells none."""
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
    """The span that this thread, or task, works for."""
    return _here.get()


def inject() -> dict[str, str]:
    """What a call carries for the called to go on with the trace; nothing where nothing is traced."""
    context = _here.get()
    return {} if context is None else {TRACEPARENT: context.traceparent}


@contextmanager
def use_context(context: TraceContext | None) -> Iterator[None]:
    """In the block this thread, or task, works for that span, and its log lines carry the `trace_id`.

    Threads do not inherit it: hand `current_context` over. None changes nothing.
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
