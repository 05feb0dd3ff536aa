"""Interface between rfork and a tracing implementation: spans, tracers and the current context.

Contexts are propagated to other processes as W3C trace contexts: https://www.w3.org/TR/trace-context/

`rfork.tracing.sdk` implements it with OpenTelemetry. Without tracing, `NOOP_TRACER` does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Protocol

from typing_extensions import Self

from rfork.logs import with_fields

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
    try:
        with with_fields(trace_id=context.trace_id):
            yield
    finally:
        _here.reset(token)


Value = str | bool | int | float | Sequence[str]
"""Value of an attribute."""
SpanKindName = Literal["internal", "client", "server"]
"""Role of a span: internal work, a call to another process, or the handling of such a call."""


class Span(Protocol):
    """An operation with a duration. Thread-safe; calls after its end are ignored.

    Attributes are named ``rfork.NAME``, unless OpenTelemetry has a name for them. Attributes that are None
    are omitted.
    """

    @property
    def context(self) -> TraceContext | None:
        """Context for referring to this span; None without tracing."""
        ...

    def set(self, **values: Value | None) -> None:
        """Set attributes."""
        ...

    def event(self, name: str, **values: Value | None) -> None:
        """Record an event at the current time."""
        ...

    def fail(self, error: BaseException | str) -> None:
        """Mark the span as failed."""
        ...

    def end(self) -> None:
        """End the span. Only the first call counts."""
        ...


class Tracer(Protocol):
    """Creates spans. Without a `parent`, a span belongs to `current_context`, or begins a trace."""

    @property
    def enabled(self) -> bool:
        """True if spans are sent anywhere, so that callers can avoid computing expensive attributes."""
        ...

    def start_span(
        self,
        name: str,
        *,
        parent: TraceContext | None = None,
        links: Sequence[TraceContext | None] = (),
        kind: SpanKindName = "internal",
        **values: Value | None,
    ) -> Span:
        """Start a span that the caller must end, on any thread. `links`: related spans."""
        ...

    def span(
        self,
        name: str,
        *,
        parent: TraceContext | None = None,
        links: Sequence[TraceContext | None] = (),
        kind: SpanKindName = "internal",
        **values: Value | None,
    ) -> AbstractContextManager[Span]:
        """Return a context manager whose span is current inside the block, and failed if it raises."""
        ...


class _NoopSpan:
    """Span without effect; also its own context manager."""

    context: None = None

    def set(self, **values: Value | None) -> None:
        """Do nothing."""

    def event(self, name: str, **values: Value | None) -> None:
        """Do nothing."""

    def fail(self, error: BaseException | str) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _NoopTracer:
    """Tracer without effect.

    opentelemetry-api has one too, but is not a base dependency: it would pin a package that engines pin as well,
    and rfork must run in the images that people have.
    """

    enabled = False

    def start_span(self, name: str, **values: object) -> Span:
        """See `Tracer.start_span`."""
        return NO_SPAN

    def span(self, name: str, **values: object) -> AbstractContextManager[Span]:
        """See `Tracer.span`."""
        return NO_SPAN


NO_SPAN: Final = _NoopSpan()
NOOP_TRACER: Final[Tracer] = _NoopTracer()
