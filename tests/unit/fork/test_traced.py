"""The spans of one fork, and what the planner and the sources are told of its trace."""

from __future__ import annotations

import pytest

from rfork.errors import NothingLeft
from rfork.fork.fallback import Fallback
from rfork.fork.session import ForkSession
from rfork.image.capture import capture
from rfork.tracing import TraceContext
from rfork.transport.memory import Faults
from tests.unit.fork.fleet import FORK_ID, Fleet, plan, route
from tests.unit.fork.planner import FakePlanner
from tests.unit.fork.sessions import ALL, TWOS, Model, planning, session
from tests.unit.tracing.spans import Kept


def traced(fleet: Fleet, planner: FakePlanner, kept: Kept, *ways: Fallback) -> ForkSession:
    """A fork whose spans are kept."""
    return session(fleet, Model(1.0), planner, *ways, tracer=kept.tracer)


def test_the_spans_of_a_fork(fleet: Fleet) -> None:
    """One for all of it, its phases within, one for each source that it read, and there what was given."""
    kept = Kept()
    seed = fleet.source("a", capture(Model(0.0)), tracer=kept.tracer)
    planner = planning(lambda: plan(route(seed, ALL)))
    report = traced(fleet, planner, kept).run()
    assert {
        "fork": None, "capture": "fork", "transfer": "fork", "plan": "transfer", "read from peer": "transfer",
        "give": "read from peer",
    } == {name: kept.parent(name) for name in kept.spans}  # fmt: skip
    fork, read = kept.attributes("fork"), kept.attributes("read from peer")
    assert ("forked", "model", report.image_bytes, 0, ()) == (
        fork["rfork.outcome"], fork["rfork.model"], fork["rfork.bytes"], fork["rfork.replans"],
        fork["rfork.reasons"],
    )  # fmt: skip
    assert ("a", "memory", report.chunks, report.image_bytes, report.chunks) == (
        read["rfork.source"], read["rfork.transport"], read["rfork.chunks"], read["rfork.bytes"],
        read["rfork.planned_chunks"],
    )  # fmt: skip
    give = kept.attributes("give")
    assert ("a", FORK_ID, "memory", report.image_bytes) == (
        give["rfork.instance"], give["rfork.fork"], give["rfork.transport"], give["rfork.bytes"],
    )  # fmt: skip
    assert {report.trace_id} == {f"{span.context.trace_id:032x}" for span in kept.spans.values()}
    assert report.seed is not None
    report.seed.close()


def test_the_planner_is_told_the_trace(fleet: Fleet) -> None:
    """With the span of what it is asked for: the plan's, and at the end the fork's own."""
    kept, seed = Kept(), fleet.source("a", capture(Model(0.0)))
    planner = planning(lambda: plan(route(seed, ALL)))
    report = traced(fleet, planner, kept).run()
    names = {f"{span.context.span_id:016x}": name for name, span in kept.spans.items()}
    told = {
        path.rpartition("/")[2]: names[context.span_id]
        for path, text in planner.traceparents
        if (context := TraceContext.parse(text)) is not None
    }
    assert {"forks": "plan", "finish": "fork"} == told
    assert report.seed is not None
    report.seed.close()


def test_a_source_that_fails_is_an_event_of_its_read(fleet: Fleet) -> None:
    """Its span failed, and the fork, which found another, did not."""
    kept, faults = Kept(), Faults(corrupt_chunks={1})
    bad = fleet.source("bad", capture(Model(0.0)), faults=faults)
    good = fleet.source("good", capture(Model(0.0)))
    planner = planning(lambda: plan(route(bad, ALL)), lambda: plan(route(good, ALL)))
    report = traced(fleet, planner, kept).run()
    reads = [span for span in kept.all_named("read from peer") if span.events]
    assert [("failure", "SourceCorrupt", "bad", False)] == [
        (
            span.events[0].name,
            (span.events[0].attributes or {})["error.type"],
            (span.attributes or {})["rfork.source"],
            span.status.is_ok,
        )
        for span in reads
    ]
    assert kept.spans["fork"].status.is_unset
    assert report.seed is not None
    report.seed.close()


def test_a_fallback_is_a_phase_that_says_why(fleet: Fleet) -> None:
    """And the fork's span tells what was loaded instead."""
    kept = Kept()
    planner = planning(lambda: plan())
    report = traced(fleet, planner, kept, TWOS).run()
    fork, fallback = kept.attributes("fork"), kept.attributes("fallback")
    assert ("fallback", "twos", "twos", "fork", list(report.reasons)) == (
        fork["rfork.outcome"], fork["rfork.fallback"], fallback["rfork.source"], kept.parent("fallback"),
        [fallback["rfork.because"]],
    )  # fmt: skip
    assert report.seed is not None
    report.seed.close()


def test_a_fork_that_has_nothing_left_failed(fleet: Fleet) -> None:
    """Its span says so; nothing is left open."""
    kept = Kept()
    with pytest.raises(NothingLeft):
        traced(fleet, planning(lambda: plan()), kept).run()
    assert (False, "NothingLeft") == (
        kept.spans["fork"].status.is_ok,
        kept.attributes("fork")["error.type"],
    )
