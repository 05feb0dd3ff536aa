"""Interface between rfork and a tracing implementation: `rfork.tracing.sdk`, or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Literal, Protocol, Self

from rfork.tracing.context import TraceContext

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
    """Tracer without effect."""

    enabled = False

    def start_span(self, name: str, **values: object) -> Span:
        """See `Tracer.start_span`."""
        return NO_SPAN

    def span(self, name: str, **values: object) -> AbstractContextManager[Span]:
        """See `Tracer.span`."""
        return NO_SPAN


NO_SPAN: Final = _NoopSpan()
NOOP_TRACER: Final[Tracer] = _NoopTracer()
