"""The service's plans for holders' forks that run at the same time as those of engines."""

from __future__ import annotations

import pytest

from planner.core.plans import PAUSE_S, YIELD_REASON
from planner.plan_service import PlanService
from rfork.schema import ForkProgress, ForkRequest, ForkResult, Placement, Plan
from tests.unit.planner.builders import FakeTime, make_service, report, seed_report

ALL = ((0, 12),)
TRANSPORTS = ("shared_memory", "http")
FORKED = ForkResult(outcome="forked", seconds=1, bytes_read=12 << 20)


@pytest.fixture
def service() -> PlanService:
    return make_service(FakeTime())


async def fork(service: PlanService, target: str, *verified: tuple[int, int], **changes: object) -> Plan:
    """Return the plan of an engine's fork."""
    usual: dict[str, object] = {"transports": TRANSPORTS, "max_readers": 8}
    target_report = report(target, *verified, **(usual | changes))
    return await service.plan(ForkRequest(fork_id=f"fork-{target}", instance=target_report))


async def prefetch(service: PlanService, target: str, *verified: tuple[int, int], **changes: object) -> Plan:
    """Return the plan of a holder's fork."""
    return await fork(service, target, *verified, holder=f"holder-of-{target}", **changes)


async def suggestion(service: PlanService, target: str, *verified: tuple[int, int]) -> str | None:
    """Return why a target is to request another plan."""
    progress = ForkProgress(verified=verified, bytes_read=0, bytes_per_s=0)
    return (await service.progress(f"fork-{target}", progress)).replan_suggested


def sources(plan: Plan) -> list[str]:
    return [route.source_id for route in plan.routes]


def on(host: str) -> Placement:
    return Placement(host=f"host-{host}")


async def report_seed(service: PlanService, name: str, **changes: object) -> None:
    await service.report(seed_report(name, **({"transports": TRANSPORTS, "max_readers": 8} | changes)))


async def test_a_prefetch_is_replanned_once_an_engine_reads_from_its_source(service: PlanService) -> None:
    """Its next plan is empty, as the engine accepts no readers."""
    await report_seed(service, "s")
    assert ["s"] == sources(await prefetch(service, "h"))
    assert await suggestion(service, "h") is None
    await fork(service, "e", max_readers=0)
    assert YIELD_REASON == await suggestion(service, "h", (0, 4))
    paused = await prefetch(service, "h", (0, 4))
    assert paused.is_paused
    assert PAUSE_S == paused.retry_after_s


async def test_a_prefetch_continues_once_the_engine_is_complete(service: PlanService) -> None:
    """The seed has no other reader."""
    await report_seed(service, "s")
    await fork(service, "e", max_readers=0)
    assert (await prefetch(service, "h")).is_paused
    await service.finish("fork-e", FORKED)
    assert "s" in sources(await prefetch(service, "h"))


async def test_a_prefetch_yields_to_an_engine_of_another_model_on_its_host(service: PlanService) -> None:
    """They share the host's link."""
    await report_seed(service, "s")
    await report_seed(service, "other", model="m2")
    await prefetch(service, "h")
    await fork(service, "e", model="m2", placement=on("h"))
    assert YIELD_REASON == await suggestion(service, "h")
    assert (await prefetch(service, "h")).is_paused


async def test_a_prefetch_yields_to_an_engine_that_reads_from_its_sources_host(service: PlanService) -> None:
    """Also from another instance there."""
    await report_seed(service, "s")
    await report_seed(service, "other", model="m2", placement=on("s"))
    await prefetch(service, "h")
    await fork(service, "e", model="m2")
    assert YIELD_REASON == await suggestion(service, "h")


async def test_a_prefetch_does_not_yield_to_another(service: PlanService) -> None:
    """The second one reads below the first."""
    await report_seed(service, "s")
    await prefetch(service, "h")
    assert ["h"] == sources(await prefetch(service, "g"))
    assert await suggestion(service, "h") is None


async def test_a_prefetch_that_an_engine_waits_for_does_not_yield(service: PlanService) -> None:
    """The engine on its host depends on it."""
    await report_seed(service, "s")
    await prefetch(service, "h")
    assert ["h"] == sources(await fork(service, "e", placement=on("h")))
    await fork(service, "other")
    assert await suggestion(service, "h", (0, 4)) is None
    assert ["s"] == sources(await prefetch(service, "h", (0, 4)))


async def test_an_engine_does_not_depend_on_a_paused_relay(service: PlanService) -> None:
    """It reads there what the relay has, and the rest elsewhere; the relay then reads from the engine."""
    await report_seed(service, "s")
    await fork(service, "other", max_readers=0)
    assert (await prefetch(service, "h", (0, 4), placement=on("h"))).is_paused
    plan = await fork(service, "e", placement=on("h"))
    assert {"h": ((0, 4),), "s": ((4, 12),)} == {route.source_id: route.chunks for route in plan.routes}
    assert ["e"] == sources(await prefetch(service, "h", (0, 4)))


async def test_a_prefetch_leaves_the_only_slot_to_an_engine_that_waits(service: PlanService) -> None:
    """The engine gets it with its next request."""
    await report_seed(service, "s", max_readers=1)
    await prefetch(service, "h", max_readers=0)
    assert [] == sources(await fork(service, "e"))
    assert YIELD_REASON == await suggestion(service, "h")
    assert (await prefetch(service, "h", max_readers=0)).is_paused
    assert ["s"] == sources(await fork(service, "e"))
