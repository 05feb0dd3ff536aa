"""The planner's choice of a version: reasons and metrics."""

from __future__ import annotations

import pytest

from planner.core.problems import ProblemError
from planner.plan_service import PlanService
from planner.policy.types import Storage
from rfork.schema import Rank
from tests.unit.planner.builders import FakeTime, fork_request, make_service, seed_report, storage_candidates

NOTHING = {"served": 0.0, "several": 0.0, "conflict": 0.0}


@pytest.fixture
def service() -> PlanService:
    """An empty service."""
    return make_service(FakeTime())


def counted(service: PlanService) -> dict[str, float]:
    """Return the counter of choices by its label."""
    [family] = [
        family for family in service._metrics.registry.collect() if family.name == "rfork_planner_version_choices"
    ]
    return {sample.labels["choice"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


async def test_an_adopted_version_is_named_and_counted_once(service: PlanService) -> None:
    """Replans do not count again."""
    await service.report(seed_report("s", version="v1"))
    plan = await service.plan(fork_request("t", version=None))
    assert "adopts version v1; from seed s (0 other readers)" == plan.reason
    plan = await service.plan(fork_request("t", version="v1", any_version=True))
    assert plan.reason.startswith("adopts version v1")
    assert NOTHING | {"served": 1.0} == counted(service)


async def test_several_versions_are_refused_by_name(service: PlanService) -> None:
    """The reason lists them, and does not call the target the first of a version."""
    for name in ("v1", "v2"):
        await service.report(seed_report(name, version=name))
    plan = await service.plan(fork_request("t", version=None))
    assert (
        "2 versions of m are served (v1, v2) and this target states none; "
        "no version of model m can be adopted; 1 instance serves v1, 1 instance serves v2"
    ) == plan.reason
    assert NOTHING | {"several": 1.0} == counted(service)


async def test_a_conflict_within_a_replica_is_counted(service: PlanService) -> None:
    """Two ranks have different files."""
    ranks = [Rank(tp=tp, tp_size=2) for tp in range(2)]
    await service.plan(fork_request("r0", version="v1", rank=ranks[0], replica="r"))
    with pytest.raises(ProblemError, match="replica r uses version v1"):
        await service.plan(fork_request("r1", version="v2", rank=ranks[1], replica="r"))
    assert NOTHING | {"conflict": 1.0} == counted(service)


async def test_a_version_of_the_targets_own_is_not_counted(service: PlanService) -> None:
    """The usual case is not an event."""
    await service.report(seed_report("s", version="v1"))
    await service.plan(fork_request("t", version="v1"))
    assert NOTHING == counted(service)


async def test_a_storage_reader_of_a_new_version_is_the_first(service: PlanService) -> None:
    """The plan shows this while storage is read; targets that wait for it are not the first."""
    await service.report(seed_report("s", version="v1"))
    storage = storage_candidates(Storage("checkpoint", "file:///m", "0" * 32))
    plan = await service.plan(fork_request("t", version="v2", storage=storage))
    assert (
        "first of version v2 of model m; 1 instance serves v1; "
        "elected to read 12 of 12 chunks from checkpoint file:///m"
    ) == plan.reason
    follower = await service.plan(fork_request("u", version="v2", storage=storage))
    assert "first of version" not in follower.reason


async def test_each_rank_of_a_new_version_is_the_first(service: PlanService) -> None:
    """The second rank is still the first of its version, though the other one is already known."""
    ranks = [Rank(tp=tp, tp_size=2) for tp in range(2)]
    for rank in ranks:
        await service.report(seed_report(f"s{rank.tp}", version="v1", rank=rank))
    plans = [await service.plan(fork_request(f"t{rank.tp}", version="v2", rank=rank)) for rank in ranks]
    assert ["first of version v2 of model m; 1 instance serves v1"] * 2 == [plan.reason for plan in plans]
