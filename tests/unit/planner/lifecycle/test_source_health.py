"""Health of sources: fenced, quarantined or slow, and their measured link speed."""

from __future__ import annotations

import pytest

from planner.plan_service import PlanService
from rfork.schema import ForkResult, Placement
from tests.unit.planner.builders import (
    OTHER_WEIGHTS,
    FakeTime,
    accuse,
    fault,
    fork_request,
    report,
    seed_report,
)
from tests.unit.planner.lifecycle.fleet_fixtures import ALL, chunk_progress, routes_by_source, start_chain


@pytest.mark.parametrize(("staying", "learnt"), [(False, [3e9, 3e9]), (True, [None, None])])
async def test_link_speed_ignores_same_host_reads(
    service: PlanService, staying: bool, learnt: list[float | None]
) -> None:
    """The link speed is the fastest observed read over the network."""
    transports = ("shared_memory", "http") if staying else ("http",)
    here = Placement(host="host")
    await service.report(seed_report("s", transports=transports, placement=here))
    await service.plan(fork_request("a", transports=transports, placement=here))
    seen: list[float | None] = []
    for rate in (3e9, 1e9):
        await service.progress("fork-a", chunk_progress(1, rate))
        record = service.state.instance("a")
        seen.append(record.ingress_rate if record is not None else None)
    assert learnt == seen


async def test_new_weights_fence_the_readers_of_the_old_ones(service: PlanService) -> None:
    """Leases of the old generation are not renewed; a new plan may read the new one."""
    await start_chain(service, "a")
    before = set((await service.progress("fork-a", chunk_progress(3))).leases)
    await service.report(seed_report("s", generation=1, weights_id=OTHER_WEIGHTS))
    after = set((await service.progress("fork-a", chunk_progress(4))).leases)
    again = await service.plan(fork_request("a", faults=(fault("s", "SourceWeightsChanged"),)))
    assert {"s"} == before
    assert set() == after
    assert {"s": ALL} == routes_by_source(again)
    assert OTHER_WEIGHTS == again.weights_id


async def test_chunks_of_the_old_weights_are_not_mixed_with_the_new(service: PlanService) -> None:
    """A fork that has begun gets no source, with the reason."""
    await start_chain(service, "a")
    await service.report(seed_report("s", generation=1, weights_id=OTHER_WEIGHTS))
    plan = await service.plan(fork_request("a", (0, 4), faults=(fault("s", "SourceWeightsChanged"),)))
    assert {} == routes_by_source(plan)
    assert f"s has other weights ({OTHER_WEIGHTS})" in plan.reason


async def test_quarantine_ends_and_its_reason_is_shown_until_then(service: PlanService, time: FakeTime) -> None:
    """A source that sent wrong bytes to two hosts gets no reader for a minute."""
    await service.report(seed_report("s", max_readers=2))
    await accuse(service, "s", by="xy")
    quarantine_reasons = [service.instance("s").view(time.now).quarantined]
    for _ in range(6):
        time.now += 10
        await service.report(seed_report("s"))
    quarantine_reasons.append(service.instance("s").view(time.now).quarantined)
    assert ["SourceCorrupt", None] == quarantine_reasons
    assert {"s": ALL} == routes_by_source(await service.plan(fork_request("b")))


async def report_slow_relay(service: PlanService, time: FakeTime, reports: int = 2) -> None:
    """Report progress of a chain whose third target has a slow link, in each of these reports."""
    for _ in range(reports):
        for name, count in {"a": 10, "b": 9, "c": 1, "d": 1, "e": 1, "f": 1}.items():
            await service.progress(f"fork-{name}", chunk_progress(count, 1e8 if name == "c" else 1e9))
        time.now += 2
        await service.sweep()


async def test_readers_of_a_slow_relay_are_advised_to_replan(service: PlanService, time: FakeTime) -> None:
    """So is the relay, which leaves its sources to them. They are advised once: the new plan is kept."""
    await start_chain(service, "abcdef")
    await report_slow_relay(service, time)
    replan_reasons = {
        name: (await service.progress(f"fork-{name}", chunk_progress(1))).replan_suggested for name in "bcd"
    }
    await service.plan(fork_request("d", (0, 1), max_readers=4))
    after = (await service.progress("fork-d", chunk_progress(1))).replan_suggested
    assert {
        "b": None,
        "c": "this instance falls behind its sources, which other targets need",
        "d": "source c is falling behind",
    } == replan_reasons
    assert after is None


async def test_a_delayed_target_is_advised_to_read_from_an_idle_seed(service: PlanService, time: FakeTime) -> None:
    """It moves there, and is then advised no more."""
    await start_chain(service, "ab")
    await service.report(seed_report("new"))
    time.now += 1
    advice = [(await service.progress("fork-b", chunk_progress(1, rate))).replan_suggested for rate in (1e9, 1e8)]
    plan = await service.plan(fork_request("b", (0, 1)))
    time.now += 1
    after = (await service.progress("fork-b", chunk_progress(1, 1e8))).replan_suggested
    assert [None, "seed new has no readers, and the current sources are slower"] == advice
    assert {"new": ((1, 12),)} == routes_by_source(plan)
    assert after is None


async def test_a_target_is_not_advised_to_read_from_a_seed_that_it_cannot_reach(
    service: PlanService, time: FakeTime
) -> None:
    """The plan would stay the same, and the advice would be repeated with every report."""
    await start_chain(service, "ab")
    await service.report(seed_report("new", transports=("nixl",)))
    time.now += 1
    await service.progress("fork-b", chunk_progress(1, 1e9))
    assert (await service.progress("fork-b", chunk_progress(1, 1e8))).replan_suggested is None


async def test_one_report_does_not_show_a_slow_relay(service: PlanService, time: FakeTime) -> None:
    """It may have paused, and other sweeps see the same report."""
    await start_chain(service, "abcdef")
    await report_slow_relay(service, time, reports=1)
    await service.sweep()
    assert not service.instance("c").source.slow


async def test_a_slow_mark_ends_with_its_fork(service: PlanService, time: FakeTime) -> None:
    """The instance's next fork starts without it."""
    await start_chain(service, "abcdef")
    await report_slow_relay(service, time)
    slow = service.instance("c").source.slow
    await service.plan(fork_request("c").model_copy(update={"fork_id": "again"}))
    assert slow
    assert not service.instance("c").source.slow


async def test_one_target_with_bad_memory_quarantines_no_source(service: PlanService) -> None:
    """After it accuses a second source, none of its accusations has full credibility."""
    for name in "stu":
        await service.report(seed_report(name))
    plan = await service.plan(fork_request("a"))
    lies = tuple(fault(route.source_id, "SourceCorrupt") for route in plan.routes)
    await service.plan(fork_request("a", faults=lies))
    assert 1 < len(lies)
    assert [""] * 3 == [service.instance(name).quarantine for name in "stu"]


async def test_a_fenced_source_is_not_used_again(service: PlanService) -> None:
    """After its generation changed and its fork ended, its reader gets another source."""
    await service.report(seed_report("s"))
    await start_chain(service, "ab")
    await service.finish("fork-a", ForkResult(outcome="fallback", seconds=1, bytes_read=0))
    await service.report(report("a", generation=1))
    plan = await service.plan(fork_request("b", faults=(fault("a", "SourceWeightsChanged"),)))
    assert {"s": ((0, 12),)} == routes_by_source(plan)


async def test_a_fork_that_avoids_the_seed_of_the_preferred_weights_gets_another(service: PlanService) -> None:
    """Two seeds serve different bytes as one version; the fork has begun with neither."""
    await service.report(seed_report("old"))
    await service.report(seed_report("new", generation=1, weights_id=OTHER_WEIGHTS))
    preferred = routes_by_source(await service.plan(fork_request("a")))
    other = routes_by_source(await service.plan(fork_request("a", faults=(fault("new", "SourceWeightsChanged"),))))
    assert {"new": ALL} == preferred
    assert {"old": ALL} == other
