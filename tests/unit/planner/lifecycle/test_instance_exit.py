"""Who may exit, who is drained, who is forgotten, and what holds meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from planner.http_errors import ProblemError
from planner.registry import Registry
from planner.store.base import CommitConflict
from rfork.schema import ExitCheck
from tests.unit.planner.builders import (
    OTHER_LAYOUT,
    OTHER_WEIGHTS,
    FakeTime,
    fault,
    fork_request,
    make_registry,
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
        "the planner has just started: it does not know yet who reads from whom",
    ),
    ("read from", ["s"], True, False, 1, "forks that read from it: 1"),
    (
        "idle",
        ["s", "t"],
        False,
        True,
        0,
        "nobody reads from it; drain it first, or somebody may be sent to it",
    ),
]


@pytest.mark.parametrize(("why", "seeds", "reader", "may", "readers", "reason"), EXIT_CASES)
async def test_may_exit(
    registry: Registry, why: str, seeds: list[str], reader: bool, may: bool, readers: int, reason: str
) -> None:
    """What a preStop hook is told of `s`."""
    for name in seeds:
        await registry.report(seed_report(name))
    if reader:
        await registry.request_plan(fork_request("a"))
    assert ExitCheck(can_exit=may, readers=readers, reason=reason) == await registry.can_exit("s")


async def test_once_the_fleet_was_heard_who_is_not_known_may_exit(registry: Registry, time: FakeTime) -> None:
    """One heartbeat after its start the planner knows everybody."""
    before = await registry.can_exit("s")
    time.now += 5
    after = await registry.can_exit("s")
    assert (False, True) == (before.can_exit, after.can_exit)


async def test_a_drained_seed_may_exit_once_its_readers_are_done(registry: Registry) -> None:
    """It keeps the readers it has, and gets no new ones."""
    await registry.report(seed_report("t", max_readers=0))
    await start_chain(registry, "a")
    await registry.drain("s")
    kept = await registry.request_plan(fork_request("a"))
    refused = await registry.request_plan(
        fork_request("b", placement={"host": "elsewhere"}, faults=(fault("a", "SourceBusy"),))
    )
    waits = (await registry.can_exit("s")).can_exit
    await registry.finish("fork-a", FORKED)
    assert ({"s": ALL}, {}, False, "it is drained and nobody reads from it") == (
        routes_by_source(kept), routes_by_source(refused), waits, (await registry.can_exit("s")).reason,
    )  # fmt: skip


async def test_the_last_seed_is_not_drained_without_force(registry: Registry) -> None:
    """Nor may it exit while forks are under way that may need it."""
    await start_chain(registry, "ab")
    with pytest.raises(ProblemError) as refused:
        await registry.drain("s")
    drained = await registry.drain("s", force=True)
    await registry.finish("fork-a", FORKED.model_copy(update={"outcome": "failed"}))
    assert (409, "last-seed", "draining") == (refused.value.status, refused.value.slug, drained.source.state)
    assert not (await registry.can_exit("s")).can_exit


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
async def test_who_counts_as_another_seed(registry: Registry, other: object, last: bool) -> None:
    """Complete, of the same weights and layout, and not draining itself."""
    await registry.report(seed_report("s"))
    await registry.report(other)  # type: ignore[arg-type]
    try:
        await registry.drain("s")
        refused = False
    except ProblemError:
        refused = True
    assert last == refused


async def test_a_relay_is_never_the_last_seed(registry: Registry) -> None:
    """It may be drained."""
    await start_chain(registry, "a")
    assert "draining" == (await registry.drain("a")).source.state


async def test_the_silent_are_forgotten_with_their_forks(registry: Registry, time: FakeTime) -> None:
    """The seed goes on; the silent target's place is free, and others are not affected."""
    await start_chain(registry, "a", max_readers=1)
    for _ in range(4):
        time.now += 6
        await registry.report(seed_report("s", max_readers=1))
    with pytest.raises(ProblemError) as unknown:
        registry.instance("a")
    fork = registry.fork("fork-a")
    assert (404, "failed", {"s": ALL}) == (
        unknown.value.status,
        fork.state,
        routes_by_source(await registry.request_plan(fork_request("b"))),
    )


async def test_progress_is_a_sign_of_life(registry: Registry, time: FakeTime) -> None:
    """A target that is busy reading sends no heartbeat, and is not forgotten."""
    await start_chain(registry, "a")
    for count in range(1, 8):
        time.now += 10
        await registry.report(seed_report("s"))
        await registry.progress("fork-a", chunk_progress(count))
    instance, fork = registry.instance("a").report, registry.fork("fork-a")
    assert ("loading", "running", ((0, 7),)) == (instance.state, fork.state, instance.verified)


async def test_a_drain_in_the_window_of_a_batch_holds(time: FakeTime) -> None:
    """The plan that comes after it puts the report onto what is known then."""
    registry = make_registry(time, batch_window_s=0.02)
    await registry.report(report("a"))
    plan_task = asyncio.create_task(registry.request_plan(fork_request("a")))
    await asyncio.sleep(0)
    await registry.drain("a")
    await plan_task
    assert registry.instance("a").drained


async def test_a_removal_in_the_window_of_a_batch_holds(time: FakeTime) -> None:
    """Who was removed meanwhile is told so, and is not there again."""
    registry = make_registry(time, batch_window_s=0.02)
    await registry.report(report("a"))
    plan_task = asyncio.create_task(registry.request_plan(fork_request("a")))
    await asyncio.sleep(0)
    await registry.remove("a")
    with pytest.raises(ProblemError, match="was removed"):
        await plan_task
    assert None is registry.state.instance("a")


async def test_of_two_drains_of_the_last_two_one_is_refused(time: FakeTime) -> None:
    """The store takes the first; the second looks again, and finds that it is the last."""
    store = FailingStore(time)
    registry = make_registry(time, store)
    for name in "st":
        await registry.report(seed_report(name))
    await registry.drain("t")
    store.failures, store.error = 1, CommitConflict()
    with pytest.raises(ProblemError, match="last that holds"):
        await registry.drain("s")
