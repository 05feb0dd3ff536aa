"""How one process tells another which span it works for."""

from __future__ import annotations

import threading

import pytest
import structlog

from rfork.tracing import TraceContext, current_context, inject, use_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", TraceContext(TRACE, SPAN, sampled=True)),
        (f"00-{TRACE}-{SPAN}-00", TraceContext(TRACE, SPAN, sampled=False)),
        (f"00-{TRACE}-{SPAN}-03".encode(), TraceContext(TRACE, SPAN, sampled=True)),
        (f"cc-{TRACE}-{SPAN}-01-what comes later", TraceContext(TRACE, SPAN, sampled=True)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        ("", None),
        (None, None),
    ],
)
def test_a_traceparent_is_read_as_the_specification_says(
    text: str | bytes | None, expected: TraceContext | None
) -> None:
    """Later versions may say more; ids of zeros, and whatever else does not fit, are none."""
    assert expected == TraceContext.parse(text)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_context_is_itself_again_from_its_text(sampled: bool) -> None:
    """Whether it is sent goes with it."""
    context = TraceContext(TRACE, SPAN, sampled=sampled)
    assert context == TraceContext.parse(context.traceparent)


def test_a_thread_works_for_a_span_while_the_block_lasts() -> None:
    """Its calls carry it, and its log lines the trace; another thread's do not."""
    context, others = TraceContext(TRACE, SPAN), list[TraceContext | None]()
    with use_context(context):
        with use_context(None):
            inside = current_context()
        thread = threading.Thread(target=lambda: others.append(current_context()))
        thread.start()
        thread.join()
        during = inject(), structlog.contextvars.get_contextvars().get("trace_id")
    after = current_context(), inject(), structlog.contextvars.get_contextvars()
    assert (context, [None], ({"traceparent": context.traceparent}, TRACE), (None, {}, {})) == (
        inside, others, during, after,
    )  # fmt: skip
