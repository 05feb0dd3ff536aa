"""The seam between rfork and what makes spans: `rfork.tracing.sdk`, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Literal, Protocol, Self

from rfork.tracing.context import TraceContext

Value = str | bool | int | float | Sequence[str]
"""Of an attribute."""
SpanKindName = Literal["internal", "client", "server"]
"""Whether a span is work of its own, a call of another process, or the answer to one."""


class Span(Protocol):
    """Something that takes time. Thread-safe; what comes after its end is ignored.

    Attributes are rfork's own (``rfork.NAME``), unless OpenTelemetry has a name for them. One that is None is
    left out.
    """

    @property
    def context(self) -> TraceContext | None:
        """As others refer to it; None where nothing is traced."""
        ...

    def set(self, **values: Value | None) -> None:
        """Attributes that are known by now."""
        ...

    def event(self, name: str, **values: Value | None) -> None:
        """Something that happened within it, now."""
        ...

    def fail(self, error: BaseException | str) -> None:
        """It did not come to a good end."""
        ...

    def end(self) -> None:
        """It is over. The first call counts."""
        ...


class Tracer(Protocol):
    """Makes spans. Without a `parent` a span belongs to what `here` says, or begins a trace."""

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere: what costs something to find out is asked for only then."""
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
        """A span that somebody ends, on any thread. `links`: others that it has to do with."""
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
        """A span for the time of a ``with`` block, which works for it; failed where the block raises."""
        ...


class _NoopSpan:
    """What is not traced; as a context manager too, so that it need not be made."""

    context: None = None

    def set(self, **values: Value | None) -> None:
        """Nothing."""

    def event(self, name: str, **values: Value | None) -> None:
        """Nothing."""

    def fail(self, error: BaseException | str) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _NoopTracer:
    """Traces nothing."""

    enabled = False

    def start_span(self, name: str, **values: object) -> Span:
        """See `Tracer.start_span`."""
        return NO_SPAN

    def span(self, name: str, **values: object) -> AbstractContextManager[Span]:
        """See `Tracer.span`."""
        return NO_SPAN


NO_SPAN: Final = _NoopSpan()
NOOP_TRACER: Final[Tracer] = _NoopTracer()
