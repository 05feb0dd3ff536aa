"""Exit checks, draining, removal and expiry of instances."""

from __future__ import annotations

import asyncio

import pytest

from planner.core.problems import ProblemError
from planner.plan_service import PlanService
from planner.store.base import CommitConflict
from rfork.schema import ExitCheck
from tests.unit.planner.builders import (
    OTHER_LAYOUT,
    OTHER_WEIGHTS,
    FakeTime,
    fault,
    fork_request,
    make_service,
    report,
    seed_report,
)
from tests.unit.planner.lifecycle.fleet_fixtures import (
    ALL,
    FORKED,
    FailingStore,
    chunk_progress,
    routes_by_source,
    start_chain,
)

EXIT_CASES = [
    (
        "unknown",
        [],
        False,
        False,
        0,
        "the planner has just started: it does not know the readers yet",
    ),
    ("has a reader", ["s"], True, False, 1, "forks that read from it: 1"),
    (
        "idle",
        ["s", "t"],
        False,
        True,
        0,
        "no fork reads from it; drain it first, or it may be assigned readers",
    ),
]


@pytest.mark.parametrize(("case", "seeds", "reader", "may", "readers", "reason"), EXIT_CASES)
async def test_the_exit_check_depends_on_readers_and_other_seeds(
    service: PlanService, case: str, seeds: list[str], reader: bool, may: bool, readers: int, reason: str
) -> None:
    """The exit check of `s` in various fleets."""
    for name in seeds:
        await service.report(seed_report(name))
    if reader:
        await service.plan(fork_request("a"))
    assert ExitCheck(can_exit=may, readers=readers, reason=reason) == await service.can_exit("s")


async def test_an_unknown_instance_may_exit_after_the_first_heartbeat_interval(
    service: PlanService, time: FakeTime
) -> None:
    """The planner knows every instance one heartbeat after its start."""
    before = await service.can_exit("s")
    time.now += 5
    after = await service.can_exit("s")
    assert not before.can_exit
    assert after.can_exit


async def test_a_drained_seed_may_exit_once_its_readers_are_done(service: PlanService) -> None:
    """It keeps its readers and gets no new ones."""
    await service.report(seed_report("t", max_readers=0))
    await start_chain(service, "a")
    await service.drain("s")
    kept = await service.plan(fork_request("a"))
    refused = await service.plan(fork_request("b", placement={"host": "elsewhere"}, faults=(fault("a", "SourceBusy"),)))
    waits = (await service.can_exit("s")).can_exit
    await service.finish("fork-a", FORKED)
    assert {"s": ALL} == routes_by_source(kept)
    assert {} == routes_by_source(refused)
    assert not waits
    assert "it is drained and has no readers" == (await service.can_exit("s")).reason


async def test_the_last_seed_is_not_drained_without_force(service: PlanService) -> None:
    """It may not exit either while running forks may need it."""
    await start_chain(service, "ab")
    with pytest.raises(ProblemError) as refused:
        await service.drain("s")
    drained = await service.drain("s", force=True)
    await service.finish("fork-a", FORKED.model_copy(update={"outcome": "failed"}))
    assert 409 == refused.value.status
    assert "last-seed" == refused.value.slug
    assert "draining" == drained.source.state
    assert not (await service.can_exit("s")).can_exit


@pytest.mark.parametrize(
    ("other", "last"),
    [
        (seed_report("o"), False),
        (seed_report("o", weights_id=OTHER_WEIGHTS), True),
        (seed_report("o", layout_id=OTHER_LAYOUT), True),
        (seed_report("o", state="draining"), True),
        (report("o", (0, 11)), True),
        (seed_report("o", model="other"), True),
    ],
)
async def test_only_complete_seeds_of_the_same_weights_count_as_other_seeds(
    service: PlanService, other: object, last: bool
) -> None:
    """Another seed counts if it is complete, not draining, and has the same weights and layout."""
    await service.report(seed_report("s"))
    await service.report(other)  # type: ignore[arg-type]
    try:
        await service.drain("s")
        refused = False
    except ProblemError:
        refused = True
    assert last == refused


async def test_a_relay_is_never_the_last_seed(service: PlanService) -> None:
    """A relay may be drained."""
    await start_chain(service, "a")
    assert "draining" == (await service.drain("a")).source.state


async def test_silent_instances_are_forgotten_with_their_forks(service: PlanService, time: FakeTime) -> None:
    """The silent target's slot at the seed becomes free; others are unaffected."""
    await start_chain(service, "a", max_readers=1)
    for _ in range(4):
        time.now += 6
        await service.report(seed_report("s", max_readers=1))
    with pytest.raises(ProblemError) as unknown:
        service.instance("a")
    fork = service.fork("fork-a")
    assert 404 == unknown.value.status
    assert "failed" == fork.state
    assert {"s": ALL} == routes_by_source(await service.plan(fork_request("b")))


async def test_progress_counts_as_a_heartbeat(service: PlanService, time: FakeTime) -> None:
    """A target that reports progress is not forgotten."""
    await start_chain(service, "a")
    for count in range(1, 8):
        time.now += 10
        await service.report(seed_report("s"))
        await service.progress("fork-a", chunk_progress(count))
    instance, fork = service.instance("a").report, service.fork("fork-a")
    assert "loading" == instance.state
    assert "running" == fork.state
    assert ((0, 7),) == instance.verified


async def test_a_drain_during_a_batch_window_is_kept(time: FakeTime) -> None:
    """The later plan uses the drained record."""
    service = make_service(time, batch_window_s=0.02)
    await service.report(report("a"))
    plan_task = asyncio.create_task(service.plan(fork_request("a")))
    await asyncio.sleep(0)
    await service.drain("a")
    await plan_task
    assert service.instance("a").drained


async def test_a_removal_during_a_batch_window_is_kept(time: FakeTime) -> None:
    """The removed target gets an error, and its record does not return."""
    service = make_service(time, batch_window_s=0.02)
    await service.report(report("a"))
    plan_task = asyncio.create_task(service.plan(fork_request("a")))
    await asyncio.sleep(0)
    await service.remove("a")
    with pytest.raises(ProblemError, match="was removed"):
        await plan_task
    assert None is service.state.instance("a")


async def test_one_of_two_concurrent_drains_of_the_last_seeds_fails(time: FakeTime) -> None:
    """The store accepts the first; the second is checked again and fails."""
    store = FailingStore(time)
    service = make_service(time, store)
    for name in "st":
        await service.report(seed_report(name))
    await service.drain("t")
    store.failures, store.error = 1, CommitConflict()
    with pytest.raises(ProblemError, match="last seed of"):
        await service.drain("s")
