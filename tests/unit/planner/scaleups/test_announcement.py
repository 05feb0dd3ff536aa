"""Reports about scale-ups, their expiry, and the seed that is kept for them."""

from __future__ import annotations

from typing import Any

import pytest

from planner import plan_service
from planner.core.problems import ProblemError
from planner.core.scaleups import ScaleUpForecast
from planner.plan_service import PlanService
from rfork.schema import ExitCheck, Rank, ScaleUpInfo
from tests.unit.planner.builders import CHUNKS, FakeTime, accuse, report, seed_report
from tests.unit.planner.scaleups.arrivals import RANKS, scaleup

LAST_SEED_REASON = "it is the last seed of version v1 of these weights, and 3 replicas are expected"


async def test_the_last_seed_stays_while_replicas_are_expected(service: PlanService) -> None:
    """It cannot be drained without force, and may not exit; after draining it may."""
    await service.report(seed_report("s"))
    before = await service.can_exit("s")
    await service.announce(scaleup(3))
    with pytest.raises(ProblemError) as refused:
        await service.drain("s")
    during = await service.can_exit("s")
    await service.drain("s", force=True)
    after = await service.can_exit("s")
    assert before.can_exit
    assert ExitCheck(can_exit=False, readers=0, reason=LAST_SEED_REASON) == during
    assert after.can_exit
    assert (
        f"instance s {LAST_SEED_REASON[3:]}: start another first, or force the drain (`rfork drain --force`)"
        == refused.value.detail
    )


async def test_a_seed_that_is_not_the_last_may_be_drained(service: PlanService) -> None:
    """Only the remaining one is kept for the expected replicas."""
    for name in "st":
        await service.report(seed_report(name))
    await service.announce(scaleup(1))
    one_of_two = await service.can_exit("s")
    await service.remove("s")
    last = await service.can_exit("t")
    assert one_of_two.can_exit
    assert not last.can_exit
    assert "it is the last seed of version v1 of these weights, and 1 replica is expected" == last.reason


NO_SOURCE_REASON = "one replica reads storage for all, or each loads by its engine's loader"
VIEWS: list[tuple[list[Any], int, int, str]] = [
    ([], 0, 0, f"no instance has m: {NO_SOURCE_REASON}"),
    ([report("t")], 0, CHUNKS, f"no instance has m: {NO_SOURCE_REASON}"),
    ([seed_report("s")], 1, CHUNKS, "they fork from 1 seed"),
    ([seed_report("s"), seed_report("t"), report("u", (0, 3))], 2, CHUNKS, "they fork from 2 seeds"),
    ([seed_report("s"), seed_report("t", state="draining")], 1, CHUNKS, "they fork from 1 seed"),
    (
        [seed_report("s", rank=RANKS[0]), seed_report("t", rank=RANKS[0]), seed_report("u", rank=RANKS[1])],
        1,
        2 * CHUNKS,
        "they fork from 1 seed",
    ),
    (
        [seed_report("s", rank=RANKS[0]), report("t", rank=RANKS[1])],
        0,
        2 * CHUNKS,
        f"no instance has rank {RANKS[1].key}: {NO_SOURCE_REASON}; other ranks fork from 1 seed",
    ),
    (
        [seed_report("s", rank=RANKS[0])],
        0,
        CHUNKS,
        f"no instance has 1 of the ranks: {NO_SOURCE_REASON}; other ranks fork from 1 seed",
    ),
    (
        [seed_report("s"), seed_report("t", rank=RANKS[0]), report("u", rank=RANKS[1])],
        1,
        CHUNKS,
        "they fork from 1 seed",
    ),
    (
        [
            seed_report("s"),
            seed_report("d", rank=Rank(role="speculative")),
            seed_report("e", rank=Rank(role="speculative")),
        ],
        1,
        2 * CHUNKS,
        "they fork from 1 seed",
    ),
]


@pytest.mark.parametrize(("reports", "seeds", "image", "reason"), VIEWS)
async def test_the_forecast_counts_the_seeds_of_the_rarest_rank(
    service: PlanService, reports: list[Any], seeds: int, image: int, reason: str
) -> None:
    """It has the seeds of the rarest rank, the bytes of all ranks of a replica, and a reason."""
    for each in reports:
        await service.report(each)
    expected = ScaleUpInfo(
        scaleup=scaleup(3),
        arrived_count=0,
        expires_in_s=900,
        seeds=seeds,
        image_bytes=image << 20,
        reason=reason,
    )
    assert expected == await service.announce(scaleup(3))


async def test_a_list_makes_one_forecast_for_each_model_and_version(
    service: PlanService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forecast visits all instances of a model, which may have many scale-ups."""
    for name in ("a", "b", "c"):
        await service.announce(scaleup(1, name))
    await service.announce(scaleup(1, "other", model="other"))
    models: list[str] = []
    forecast = service.state.forecast

    def counted(model: str, version: str | None) -> ScaleUpForecast:
        models.append(model)
        return forecast(model, version)

    monkeypatch.setattr(service.state, "forecast", counted)
    listed = [view.scaleup.scaleup_id for view in service.scaleups()]
    assert ["a", "b", "c", "other"] == listed
    assert ["m", "other"] == models


async def test_a_quarantined_source_is_not_a_seed(service: PlanService) -> None:
    """It gets no readers."""
    await service.report(seed_report("s", max_readers=2))
    await accuse(service, "s", by="tu")
    assert 0 == (await service.announce(scaleup(1))).seeds


async def test_an_expired_scale_up_is_forgotten(service: PlanService, time: FakeTime) -> None:
    """It is not listed any more, the next sweep removes it, and its id can be reused."""
    await service.announce(scaleup(3, expires_in_s=10))
    time.now += 9
    left = service.scaleup("up").expires_in_s
    time.now += 1
    listed, kept = service.scaleups(), len(service.state.scaleups.records())
    with pytest.raises(ProblemError, match="unknown scale-up up"):
        service.scaleup("up")
    await service.sweep()
    assert 1 == left
    assert [] == listed
    assert 1 == kept
    assert 0 == len(service.state.scaleups.records())


async def test_the_number_of_scale_ups_is_limited(service: PlanService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that expires first is dropped; repeating an announcement adds none."""
    monkeypatch.setattr(plan_service, "MAX_SCALEUPS", 2)
    for name, seconds in (("a", 100), ("b", 50), ("a", 90), ("c", 10), ("d", 500)):
        await service.announce(scaleup(1, name, expires_in_s=seconds))
    assert ["a", "d"] == [view.scaleup.scaleup_id for view in service.scaleups()]
