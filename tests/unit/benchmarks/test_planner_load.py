"""Fleet of the planner_load benchmark: all its targets can fork, and a planner that plans nothing ends it."""

from __future__ import annotations

import pytest

from benchmarks.planner_load import fleet as fleets
from benchmarks.planner_load.__main__ import KEYS
from benchmarks.planner_load.fleet import CallerPool, LoadFleet
from rfork.errors import RforkError
from rfork.schema import Plan
from tests.unit.planner.builders import FakeTime, make_service


@pytest.mark.parametrize("keys", [1, KEYS])
async def test_every_target_of_a_fleet_gets_sources(keys: int) -> None:
    """The seeds of each rank share a group with its targets."""
    service, fleet = make_service(FakeTime()), LoadFleet(64, keys=keys)
    for seed in fleet.seeds():
        await service.report(seed)
    for number in fleet.targets:
        plan = await service.plan(fleet.fork_request(number, 1))
        assert plan.routes, plan.reason


def test_a_planner_that_never_plans_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark ends with the planner's reason."""
    monkeypatch.setattr(fleets, "RETRY_S", 0.0)
    monkeypatch.setattr(fleets, "MAX_RETRIES", 1)
    caller = CallerPool(LoadFleet(16)).request_all()
    empty_plan = Plan(fork_id="fork-1", reason="no instance has it").model_dump_json().encode()
    next(caller)  # requests a plan until there is one
    caller.send(empty_plan)  # requests the first fork's plan
    with pytest.raises(RforkError, match="no instance has it"):
        caller.send(empty_plan)
