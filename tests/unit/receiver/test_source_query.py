"""A query uses the instances that the planner names, reports those that fail, and ends."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest

from rfork.errors import (
    LayoutMismatch,
    NoSource,
    PlannerUnreachable,
    SourceBusy,
    SourceUnavailable,
    SourceUnreachable,
    TransportUnavailable,
)
from rfork.planner_client.client import PlannerClient
from rfork.receiver.session import query_source
from rfork.receiver.source_query import QUERY_RETRY_S, QueryFailure, SourceQuery
from rfork.schema import InstanceReport, Lease, Placement, Plan, Rank, Route
from rfork.settings import InstanceSettings

SAMPLE = InstanceReport(
    instance_id="sample",
    model="m",
    version="v1",
    rank=Rank(),
    layout_id="a" * 32,
    image_bytes=1,
    chunk_count=1,
    state="serving",
    verified=((0, 1),),
    address="here:1",
    max_readers=4,
    placement=Placement(host="here"),
)
RETRY_UNTIL = 10.0


def plan(*sources: str, retry_after_s: float | None = None) -> Plan:
    routes = tuple(
        Route(
            source_id=source,
            address=f"{source}:1",
            placement=Placement(host=source),
            generation=0,
            transports=("http",),
            chunks=((0, 1),),
            lease=Lease(token="t", expires_in_s=1.0),
        )
        for source in sources
    )
    return Plan(fork_id="f", routes=routes, reason="why", retry_after_s=retry_after_s)


def query() -> SourceQuery:
    return SourceQuery(SAMPLE, "f", "query", placement=Placement(host="target"), retry_until=RETRY_UNTIL)


def names(routes: tuple[Route, ...]) -> list[str]:
    return [route.source_id for route in routes]


def test_the_query_registers_an_instance_that_nothing_waits_for() -> None:
    """It is one of the sample's image, without bytes and without readers."""
    instance = query().request.instance
    assert "query" == instance.instance_id
    assert ("m", "v1", "a" * 32) == (instance.model, instance.version, instance.layout_id)
    assert "target" == instance.placement.host
    assert ("loading", (), 0) == (instance.state, instance.verified, instance.max_readers)


def test_failed_instances_are_reported_with_the_next_plan_request() -> None:
    """The planner then names others at once."""
    machine = query()
    first, second = machine.plan_received(plan("a", "b"))
    machine.failed(first, SourceUnavailable("killed"))
    machine.failed(second, SourceUnreachable("cut"))
    assert 0.0 == machine.pause_s(plan("a", "b"), 0.0)
    faults = [(fault.instance_id, fault.fault, fault.error) for fault in machine.request.faults]
    assert [("a", "source", "SourceUnavailable"), ("b", "network", "SourceUnreachable")] == faults
    assert ["c"] == names(machine.plan_received(plan("a", "c")))


def test_an_instance_that_refuses_a_request_is_not_blamed() -> None:
    """A source without a placement map works, and others may have one."""
    machine = query()
    (route,) = machine.plan_received(plan("a"))
    machine.failed(route, LayoutMismatch("no map"))
    assert 0.0 == machine.pause_s(plan("a"), 0.0)
    assert [("a", "target")] == [(fault.instance_id, fault.fault) for fault in machine.request.faults]
    assert ["b"] == names(machine.plan_received(plan("b")))


@pytest.mark.parametrize("refusal", [LayoutMismatch("no map"), TransportUnavailable("none for host memory")])
def test_a_query_that_all_instances_refuse_ends_at_once(refusal: QueryFailure) -> None:
    """The same request would get the same answer."""
    machine = query()
    (route,) = machine.plan_received(plan("a"))
    machine.failed(route, refusal)
    machine.pause_s(plan("a"), 0.0)
    machine.plan_received(plan("a"))
    with pytest.raises(type(refusal), match=str(refusal)):
        machine.pause_s(plan("a"), 0.0)


def test_a_query_that_an_instance_refuses_waits_for_one_that_is_busy() -> None:
    """The planner names it once it has a free slot."""
    machine = query()
    (route,) = machine.plan_received(plan("a"))
    machine.failed(route, LayoutMismatch("no map"))
    machine.pause_s(plan("a"), 0.0)
    machine.plan_received(plan(retry_after_s=0.5))
    assert 0.5 == machine.pause_s(plan(retry_after_s=0.5), 0.0)
    assert ["b"] == names(machine.plan_received(plan("b")))


@pytest.mark.parametrize(
    ("error", "retry_after_s", "pause_s"),
    [(SourceBusy("all slots are used"), None, QUERY_RETRY_S), (SourceUnavailable("killed"), 2.0, 2.0)],
)
def test_instances_that_failed_are_queried_again_after_a_pause(
    error: QueryFailure, retry_after_s: float | None, pause_s: float
) -> None:
    """They may work by then."""
    machine, found = query(), plan("a", retry_after_s=retry_after_s)
    (route,) = machine.plan_received(found)
    machine.failed(route, error)
    assert 0.0 == machine.pause_s(found, 0.0)
    assert () == machine.plan_received(found)
    assert pause_s == machine.pause_s(found, 0.0)
    assert ["a"] == names(machine.plan_received(found))


def test_a_query_ends_with_its_last_failure_when_the_time_is_over() -> None:
    """Until then it is repeated."""
    machine = query()
    (route,) = machine.plan_received(plan("a"))
    machine.failed(route, SourceUnavailable("killed"))
    machine.pause_s(plan("a"), 0.0)
    machine.plan_received(plan("a"))
    with pytest.raises(SourceUnavailable, match="killed"):
        machine.pause_s(plan("a"), RETRY_UNTIL)


def test_a_query_without_any_instance_ends_with_the_planner_s_reason() -> None:
    """Unless the planner lets it wait for one."""
    machine = query()
    assert () == machine.plan_received(plan(retry_after_s=1.0))
    assert 1.0 == machine.pause_s(plan(retry_after_s=1.0), 0.0)
    assert () == machine.plan_received(plan())
    with pytest.raises(NoSource, match="why"):
        machine.pause_s(plan(), 0.0)


def test_a_planner_that_is_lost_at_the_end_of_a_query_does_not_replace_its_result() -> None:
    """The planner removes the query's records later."""
    planner = mock.Mock(spec=PlannerClient)
    planner.request_plan.return_value = plan()
    planner.remove.side_effect = PlannerUnreachable("refused")
    with (
        mock.patch.object(PlannerClient, "of", return_value=nullcontext(planner)),
        pytest.raises(NoSource, match="why"),
    ):
        query_source(SAMPLE, InstanceSettings(), 0.0, lambda peer, until: None)
    planner.remove.assert_called_once()
