"""Transfers without a source, past the deadline or interrupted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rfork.errors import DeadlineExceeded, NoSource, PlannerRejected, PlannerUnreachable, RforkError
from rfork.image.chunks import MIB
from rfork.schema import Plan
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import (
    CHUNKS,
    Fleet,
    Script,
    Target,
    image,
    live_transfer_threads,
    plan,
    route,
    settings,
)
from tests.unit.receiver.transfer_helpers import ALL, raise_plan_error, verified_by_source


@pytest.mark.parametrize(
    ("plan_factory", "error", "message"),
    [
        (lambda: plan(reason="no instance serves it"), NoSource, "no instance serves it"),
        (lambda: plan(), NoSource, "knows no source"),
        (lambda: raise_plan_error(NoSource("another layout")), NoSource, "another layout"),
        (lambda: raise_plan_error(PlannerUnreachable("unreachable")), PlannerUnreachable, "unreachable"),
        (lambda: raise_plan_error(PlannerRejected("no", status=401, problem="x")), PlannerRejected, "no"),
    ],
)
def test_no_route_at_the_start_ends_the_transfer_immediately(
    fleet: Fleet, plan_factory: Callable[[], Plan], error: type[RforkError], message: str
) -> None:
    """A retry would not help, so the fallback starts immediately."""
    script = Script([plan_factory])
    with pytest.raises(error, match=message):
        Target(fleet, script).run()
    assert 1 == len(script.faults_by_request)


def test_a_reader_slot_that_becomes_free_is_used(fleet: Fleet) -> None:
    """While all slots are in use, the fork requests a plan again after the delay set by the planner."""
    seed = fleet.source("a", image(1))
    script = Script([lambda: plan(retry_after_s=0.01), lambda: plan(route(seed, ALL))])
    target = Target(fleet, script)
    target.run()
    assert ({"a": CHUNKS}, 2) == (verified_by_source(target), len(script.faults_by_request))


def test_the_no_source_timeout_ends_the_transfer(fleet: Fleet) -> None:
    """A fork without any route waits no longer."""
    script = Script([lambda: plan(reason="all are busy", retry_after_s=0.01)])
    with pytest.raises(NoSource, match="all are busy"):
        Target(fleet, script, settings(no_source_timeout_s=0.05)).run()
    assert len(script.faults_by_request) > 1


def test_the_loss_of_the_last_source_ends_the_transfer(fleet: Fleet) -> None:
    """When the only source dies and no other is known, the error contains the reason."""
    seed = fleet.source("a", image(1), FaultInjection(dies_after_bytes=2 * MIB))
    script = Script([lambda: plan(route(seed, ALL)), lambda: plan(reason="no source left")])
    target = Target(fleet, script)
    with pytest.raises(NoSource, match="no source left"):
        target.run()
    assert (["SourceUnavailable"], 2) == (target.reasons, len(target.chunk_state))


def test_the_deadline_ends_a_fork(fleet: Fleet) -> None:
    """After the deadline no thread can write to the image."""
    seed = fleet.source("a", image(1), FaultInjection(stalls_after_bytes=2 * MIB))
    target = Target(fleet, Script([lambda: plan(route(seed, ALL))]), deadline_s=0.5)
    with pytest.raises(DeadlineExceeded, match="of 6 chunks"):
        target.run()
    assert [] == live_transfer_threads()
    assert () == seed.report().readers


def test_an_interrupt_ends_a_fork(fleet: Fleet) -> None:
    """An interrupt in the caller's thread leaves no thread running and releases the reader slot."""
    seed = fleet.source("a", image(1), FaultInjection(stalls_after_bytes=MIB))
    script = Script([lambda: plan(route(seed, (0, 2))), interrupt])
    target = Target(fleet, script)
    with pytest.raises(KeyboardInterrupt):
        target.run()
    assert ([], ()) == (live_transfer_threads(), seed.report().readers)


def interrupt() -> Plan:
    raise KeyboardInterrupt
