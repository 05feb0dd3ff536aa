"""Propagation of trace contexts between processes."""

from __future__ import annotations

import logging
import threading

import pytest

from rfork.logs import logger
from rfork.tracing import TraceContext, current_context, inject, use_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", TraceContext(TRACE, SPAN, sampled=True)),
        (f"00-{TRACE}-{SPAN}-00", TraceContext(TRACE, SPAN, sampled=False)),
        (f"00-{TRACE}-{SPAN}-03".encode(), TraceContext(TRACE, SPAN, sampled=True)),
        (f"cc-{TRACE}-{SPAN}-01-later fields", TraceContext(TRACE, SPAN, sampled=True)),
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
def test_a_traceparent_is_parsed_by_the_specification(text: str | bytes | None, expected: TraceContext | None) -> None:
    """Later versions may have more fields; zero ids and other invalid texts are ignored."""
    assert expected == TraceContext.parse(text)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_context_survives_encoding(sampled: bool) -> None:
    """The decoded context equals the original, including the sampled flag."""
    context = TraceContext(TRACE, SPAN, sampled=sampled)
    assert context == TraceContext.parse(context.traceparent)


def test_a_context_is_current_inside_the_block(caplog: pytest.LogCaptureFixture) -> None:
    """Calls and log lines of this thread carry the context; those of another thread do not."""
    caplog.set_level(logging.INFO)
    log = logger("rfork.test")
    context = TraceContext(TRACE, SPAN)
    contexts_of_thread: list[TraceContext | None] = []
    with use_context(context):
        with use_context(None):
            assert context == current_context()
        thread = threading.Thread(target=lambda: contexts_of_thread.append(current_context()))
        thread.start()
        thread.join()
        assert [None] == contexts_of_thread
        assert {"traceparent": context.traceparent} == inject()
        log.info("within")
    assert current_context() is None
    assert {} == inject()
    log.info("after")
    assert [f"within trace_id={TRACE}", "after"] == caplog.messages
