"""Recovery of forks: from store failures, planner restarts, and failed sources or storage."""

from __future__ import annotations

import re

import pytest

from planner.core.problems import ProblemError
from planner.plan_service import PlanService
from planner.store.base import CommitConflict, StoreUnavailable
from rfork.schema import ChunkAssignment, ForkResult
from tests.unit.planner.builders import (
    CHECKPOINT,
    CHUNKS,
    ORIGIN,
    SNAPSHOT,
    FakeTime,
    fault,
    fork_request,
    make_service,
    report,
    seed_report,
    storage_candidates,
)
from tests.unit.planner.lifecycle.fleet_fixtures import (
    ALL,
    FailingStore,
    chunk_progress,
    routes_by_source,
    start_chain,
)


async def test_progress_renews_leases_while_the_store_is_unavailable(time: FakeTime) -> None:
    """Running forks continue; other calls report the store's failure."""
    store = FailingStore(time)
    service = make_service(time, store)
    await start_chain(service, "a")
    store.failures = 1
    leases = set((await service.progress("fork-a", chunk_progress(3))).leases)
    store.failures = 1
    with pytest.raises(StoreUnavailable):
        await service.plan(fork_request("b"))
    assert {"s"} == leases
    assert {"a": ALL} == routes_by_source(await service.plan(fork_request("b")))


async def test_a_restarted_planner_keeps_reported_routes(time: FakeTime) -> None:
    """Targets report their current reads, in any order."""
    for order in ("abc", "cba", "bac"):
        service = make_service(time)
        await service.report(seed_report("s", readers=("fork-a",)))
        for name, reader in {"a": "b", "b": "c"}.items():
            await service.report(report(name, (0, 4), readers=(f"fork-{reader}",)))
        reported = {"a": "s", "b": "a", "c": "b"}
        plans = {}
        for name in order:
            current = (ChunkAssignment(source_id=reported[name], chunks=((4, 12),)),)
            request = fork_request(name, (0, 4)).model_copy(update={"current_assignments": current})
            plans[name] = routes_by_source(await service.plan(request))
        assert {name: {source: ((4, 12),)} for name, source in reported.items()} == plans


@pytest.mark.parametrize(("conflicts", "planned"), [(1, True), (19, True), (20, False)])
async def test_a_plan_is_repeated_after_conflicts(time: FakeTime, conflicts: int, planned: bool) -> None:
    """After twenty attempts the caller gets problem `busy`."""
    store = FailingStore(time)
    service = make_service(time, store)
    await service.report(seed_report("s"))
    store.failures, store.error = conflicts, CommitConflict()
    try:
        plan = routes_by_source(await service.plan(fork_request("a")))
        outcome = (200, "", plan)
    except ProblemError as error:
        outcome = (error.status, error.slug, {})
    assert ((200, "", {"s": ALL}) if planned else (503, "busy", {})) == outcome


async def test_current_assignments_are_validated(service: PlanService) -> None:
    """Chunks beyond the image's end are rejected."""
    current = (ChunkAssignment(source_id="s", chunks=((4, 13),)),)
    with pytest.raises(ProblemError) as refused:
        await service.plan(fork_request("a").model_copy(update={"current_assignments": current}))
    assert 422 == refused.value.status
    assert "invalid-request" == refused.value.slug


async def test_after_a_restart_a_running_fork_retries_until_its_sources_report(
    service: PlanService, time: FakeTime
) -> None:
    """A fork that began before the restart gets a retry within one heartbeat interval; a new one does not."""
    lost = await service.plan(fork_request("a", (0, 5), faults=(fault("s", "SourceTimeout"),)))
    fresh = await service.plan(fork_request("n", model="other"))
    time.now += 4
    again = await service.plan(fork_request("a", (0, 5)))
    time.now += 1
    late = await service.plan(fork_request("a", (0, 5)))
    assert lost.retry_after_s is not None
    assert fresh.retry_after_s is None
    assert again.retry_after_s is not None
    assert late.retry_after_s is None


async def test_a_fork_whose_sources_are_all_removed_gets_no_retry(service: PlanService) -> None:
    """The planner knew its sources, so no others will report."""
    await start_chain(service, "a")
    await service.remove("s")
    plan = await service.plan(fork_request("a", (0, 5), faults=(fault("s", "SourceUnavailable"),)))
    assert [] == list(plan.routes)
    assert plan.retry_after_s is None


async def test_a_follower_takes_over_from_a_reader_whose_storage_failed(service: PlanService, time: FakeTime) -> None:
    """The follower is advised to replan, reads the rest from storage, and the former reader reads from it."""
    await service.plan(fork_request("a", storage=storage_candidates(CHECKPOINT)))
    await service.plan(fork_request("b"))
    before = (await service.progress("fork-b", chunk_progress(4))).replan_suggested
    time.now += 1
    failed = (fault("a", "StorageError", "storage"),)
    waits = [
        await service.plan(fork_request("a", (0, 5), faults=faults, weights_id=None, provisional_id=ORIGIN))
        for faults in (failed, ())
    ]
    reported = (await service.progress("fork-b", chunk_progress(4))).replan_suggested
    time.now += 1
    instead = await service.plan(
        fork_request("b", (0, 4), storage=storage_candidates(CHECKPOINT), weights_id=None, provisional_id=ORIGIN)
    )
    again = await service.plan(fork_request("a", (0, 5), weights_id=None, provisional_id=ORIGIN))
    assert before is None
    assert "source a has no source of its own any more" == reported
    assert [({}, True)] * 2 == [(routes_by_source(plan), plan.retry_after_s is not None) for plan in waits]
    assert {"a": ((4, 5),)} == routes_by_source(instead)
    assert [((5, CHUNKS),)] == [read.chunks for read in instead.storage]
    assert {"b": ((5, CHUNKS),)} == routes_by_source(again)


async def test_other_storage_remains_usable_after_one_failed(service: PlanService) -> None:
    """Its snapshot is broken: the same instance is elected to read its checkpoint."""
    both = storage_candidates(SNAPSHOT, CHECKPOINT)
    await service.plan(fork_request("a", storage=both))
    plan = await service.plan(fork_request("a", faults=(fault("a", "StorageError", "storage"),), storage=both[1:]))
    assert ["checkpoint"] == [read.kind for read in plan.storage]


async def test_an_abandoned_fork_that_succeeds_is_counted_once(time: FakeTime) -> None:
    """Until it finishes it counts as abandoned only, and its duration is unknown."""
    service = make_service(time, lease_ttl_s=5, instance_ttl_s=1000)
    await service.report(seed_report("s"))
    await service.plan(fork_request("a"))
    time.now += 10
    await service.sweep()
    (group,) = service.state.groups_of("m")
    assert service.fork("fork-a").abandoned
    assert 0 == group.history.forked_bytes
    duration_before = group.history.fork_s
    await service.finish(
        "fork-a", ForkResult(outcome="forked", seconds=11, bytes_read=12 << 20, sources={"s": 12 << 20})
    )
    text = service._metrics.exposition((), ()).decode()
    counted = re.findall(r'^rfork_planner_forks_total\{outcome="(\w+)"\} 1.0$', text, re.MULTILINE)
    assert duration_before is None
    assert 11.0 == group.history.fork_s
    assert 12 << 20 == group.history.forked_bytes
    assert {"abandoned", "forked"} == set(counted)
