"""A fork that waits at one planner replica and is planned by another."""

from __future__ import annotations

import asyncio

from planner.core.problems import ProblemError
from planner.plan_service import PlanService
from planner.store.memory import MemoryStore
from rfork.schema import ForkResult, Placement, Plan
from tests.unit.planner.builders import CHUNKS, FakeTime, fork_request, make_service, seed_report
from tests.unit.planner.scaleups.arrivals import scaleup, start_requests

ALL = ((0, CHUNKS),)


async def planned_twice(time: FakeTime, meanwhile: ForkResult | None) -> tuple[PlanService, asyncio.Task[Plan]]:
    """Return both plans of a fork that waits at one planner replica and is then planned by another, which
    also receives its result if `meanwhile` is set.
    """
    store = MemoryStore(time.clock, max_finished_forks=100)
    here, there = (make_service(time, store, scaleup_wait_s=8) for _ in range(2))
    await here.report(seed_report("s1"))
    await here.announce(scaleup(2))
    (waiting,) = start_requests(here.plan(fork_request("t")))
    await asyncio.sleep(0)
    while not here.state.instances()[-1].plan_requested:
        await asyncio.sleep(0)
    await there.plan(fork_request("t"))
    await there.report(seed_report("s2", placement=Placement(host="host-t")))
    if meanwhile is not None:
        await there.finish("fork-t", meanwhile)
    await here.withdraw("up")
    await asyncio.wait([waiting])
    return here, waiting


async def test_a_fork_that_another_replica_planned_keeps_that_plan(time: FakeTime) -> None:
    """Its target follows that plan: the record and the leases must match it."""
    service, waiting = await planned_twice(time, None)
    plan = await waiting
    reads = service.fork("fork-t").reads
    assert [("s1", ALL)] == [(route.source_id, route.chunks) for route in plan.routes]
    assert [("s1", ALL)] == [(read.source_id, read.chunks) for read in reads]
    assert plan.routes[0].lease.token


async def test_a_fork_that_ended_at_another_planner_is_not_planned_again(time: FakeTime) -> None:
    """The waiting request gets an error."""
    service, waiting = await planned_twice(time, ForkResult(outcome="forked", seconds=1, bytes_read=1))
    error = waiting.exception()
    assert isinstance(error, ProblemError)
    assert 409 == error.status
    assert "fork-conflict" == error.slug
    assert not service.fork("fork-t").live
