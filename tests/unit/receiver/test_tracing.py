"""Spans of one fork, and the trace context sent to the planner and the sources."""

from __future__ import annotations

import pytest

from rfork.errors import AllSourcesFailed
from rfork.image.capture import capture
from rfork.receiver.fallback import Fallback
from rfork.receiver.session import ForkSession
from rfork.testing.transport import FaultInjection
from rfork.tracing import TraceContext
from tests.unit.receiver.fake_planner import FakePlanner
from tests.unit.receiver.fleet import FORK_ID, Fleet, plan, route
from tests.unit.receiver.sessions import ALL, TWOS, Model, scripted_planner, session
from tests.unit.tracing.span_recorder import SpanRecorder


def traced_session(fleet: Fleet, planner: FakePlanner, recorder: SpanRecorder, *fallbacks: Fallback) -> ForkSession:
    """Return a fork session whose spans are recorded."""
    return session(fleet, Model(1.0), planner, *fallbacks, tracer=recorder.tracer)


def test_a_fork_has_a_span_for_each_phase(fleet: Fleet) -> None:
    """The fork has a span, and so have each phase, each source that is read, and each source that serves."""
    recorder = SpanRecorder()
    seed = fleet.source("a", capture(Model(0.0)), tracer=recorder.tracer)
    planner = scripted_planner(lambda: plan(route(seed, ALL)))
    report = traced_session(fleet, planner, recorder).run()
    assert {
        "fork": None, "capture": "fork", "transfer": "fork", "plan": "transfer", "read from peer": "transfer",
        "serve": "read from peer",
    } == {name: recorder.parent(name) for name in recorder.spans}  # fmt: skip
    fork, read = recorder.attributes("fork"), recorder.attributes("read from peer")
    assert "forked" == fork["rfork.outcome"]
    assert "model" == fork["rfork.model"]
    assert report.image_bytes == fork["rfork.bytes"]
    assert 0 == fork["rfork.replans"]
    assert () == fork["rfork.reasons"]
    assert "a" == read["rfork.source"]
    assert "memory" == read["rfork.transport"]
    assert report.chunks == read["rfork.chunks"]
    assert report.image_bytes == read["rfork.bytes"]
    assert report.chunks == read["rfork.planned_chunks"]
    serve_attributes = recorder.attributes("serve")
    assert "a" == serve_attributes["rfork.instance"]
    assert FORK_ID == serve_attributes["rfork.fork"]
    assert "memory" == serve_attributes["rfork.transport"]
    assert report.image_bytes == serve_attributes["rfork.bytes"]
    assert {report.trace_id} == {f"{span.context.trace_id:032x}" for span in recorder.spans.values()}
    assert report.seed is not None
    report.seed.close()


def test_requests_to_the_planner_carry_the_trace(fleet: Fleet) -> None:
    """A plan request carries the plan span, the final result the fork span."""
    recorder, seed = SpanRecorder(), fleet.source("a", capture(Model(0.0)))
    planner = scripted_planner(lambda: plan(route(seed, ALL)))
    report = traced_session(fleet, planner, recorder).run()
    names = {f"{span.context.span_id:016x}": name for name, span in recorder.spans.items()}
    span_by_path = {
        path.rpartition("/")[2]: names[context.span_id]
        for path, text in planner.traceparents
        if (context := TraceContext.parse(text)) is not None
    }
    assert {"forks": "plan", "finish": "fork"} == span_by_path
    assert report.seed is not None
    report.seed.close()


def test_a_source_that_fails_is_an_event_of_its_read(fleet: Fleet) -> None:
    """The span of the read failed; the fork found another source and did not."""
    recorder, faults = SpanRecorder(), FaultInjection(corrupt_chunks={1})
    bad = fleet.source("bad", capture(Model(0.0)), faults=faults)
    good = fleet.source("good", capture(Model(0.0)))
    planner = scripted_planner(lambda: plan(route(bad, ALL)), lambda: plan(route(good, ALL)))
    report = traced_session(fleet, planner, recorder).run()
    reads = [span for span in recorder.all_named("read from peer") if span.events]
    assert [("failure", "SourceCorrupt", "bad", False)] == [
        (
            span.events[0].name,
            (span.events[0].attributes or {})["error.type"],
            (span.attributes or {})["rfork.source"],
            span.status.is_ok,
        )
        for span in reads
    ]
    assert recorder.spans["fork"].status.is_unset
    assert report.seed is not None
    report.seed.close()


def test_the_span_of_a_fallback_contains_the_reason(fleet: Fleet) -> None:
    """The fork's span contains the name of the fallback."""
    recorder = SpanRecorder()
    planner = scripted_planner(lambda: plan())
    report = traced_session(fleet, planner, recorder, TWOS).run()
    fork, fallback = recorder.attributes("fork"), recorder.attributes("fallback")
    assert "fallback" == fork["rfork.outcome"]
    assert "twos" == fork["rfork.fallback"]
    assert "twos" == fallback["rfork.source"]
    assert "fork" == recorder.parent("fallback")
    assert list(report.reasons) == [fallback["rfork.reason"]]
    assert report.seed is not None
    report.seed.close()


def test_the_span_of_a_failed_fork_has_an_error(fleet: Fleet) -> None:
    """No span is left open."""
    recorder = SpanRecorder()
    with pytest.raises(AllSourcesFailed):
        traced_session(fleet, scripted_planner(lambda: plan()), recorder).run()
    assert not recorder.spans["fork"].status.is_ok
    assert "AllSourcesFailed" == recorder.attributes("fork")["error.type"]
