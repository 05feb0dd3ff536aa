"""Fork requests that arrive together are planned together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from planner.core import batch_queue
from planner.core.records import StoreChange
from planner.plan_service import PlanService
from planner.policy import group_plan
from planner.store.base import StoreUnavailable
from planner.store.memory import MemoryStore
from rfork.schema import ForkProgress, ForkResult, Plan
from tests.unit.planner.builders import (
    CHECKPOINT,
    LOADER,
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

ALL = ((0, 12),)


class FlakyStore(MemoryStore):
    """Counts plans, and fails for the next `failures_left` of them."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__(time.clock, max_finished_forks=100)
        self.plans: list[int] = []
        """Number of forks in each plan."""
        self.failures_left = 0

    async def commit(self, change: StoreChange) -> None:
        """Count the change if it is a plan, and apply it."""
        if change.group is not None:
            if self.failures_left:
                self.failures_left -= 1
                raise StoreUnavailable("redis is unavailable")
            self.plans.append(len(change.forks))
        await super().commit(change)


class SlowStore(MemoryStore):
    """Blocks plans until released."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__(time.clock, max_finished_forks=100)
        self.began = asyncio.Event()
        self.released = asyncio.Event()

    async def commit(self, change: StoreChange) -> None:
        """Wait if the change is a plan."""
        if change.group is not None:
            self.began.set()
            await self.released.wait()
        await super().commit(change)


@pytest.fixture
def store(time: FakeTime) -> FlakyStore:
    """The store of `service`."""
    return FlakyStore(time)


@pytest.fixture
def service(time: FakeTime, store: FlakyStore, monkeypatch: pytest.MonkeyPatch) -> PlanService:
    """A service in which the first request waits for others, however slowly this machine creates them."""
    monkeypatch.setattr(batch_queue, "SOLO_WINDOW_S", 0.2)
    return make_service(time, store, batch_window_s=0.2)


def parts(plan: Plan) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the chunks by source; storage by its kind."""
    peers = {route.source_id: route.chunks for route in plan.routes}
    return peers | {str(read.kind): read.chunks for read in plan.storage}


async def test_arrivals_in_one_window_share_one_plan(service: PlanService, store: FlakyStore) -> None:
    """Ten concurrent requests get one plan, in which each has its slot."""
    await service.report(seed_report("s"))
    names = [f"t{index}" for index in range(10)]
    plans = await asyncio.gather(*(service.plan(fork_request(name)) for name in names))
    expected = [{"s": ALL}] + [{before: ALL} for before in names[:-1]]
    assert [10] == store.plans
    assert expected == [parts(plan) for plan in plans]


async def test_finishing_waits_for_a_plan_in_progress(time: FakeTime) -> None:
    """The batch is closed and the store has not accepted the plan yet."""
    store = SlowStore(time)
    service = make_service(time, store, batch_window_s=0.001)
    await service.report(seed_report("s"))
    plan_task = asyncio.create_task(service.plan(fork_request("a")))
    await store.began.wait()
    failed = ForkResult(outcome="failed", seconds=1, bytes_read=0)
    ended = asyncio.create_task(service.finish("fork-a", failed))
    await asyncio.sleep(0)
    store.released.set()
    await asyncio.gather(plan_task, ended)
    assert "failed" == service.fork("fork-a").state
    assert [] == service.state.live_forks()


async def test_groups_do_not_wait_for_one_another(service: PlanService, store: FlakyStore) -> None:
    """Each model has its own window."""
    await asyncio.gather(*(service.plan(fork_request(name, model=name)) for name in "ab"))
    assert [1, 1] == store.plans


async def test_replans_of_one_moment_share_one_plan(service: PlanService, store: FlakyStore) -> None:
    """A first plan that waits at the same time is made separately."""
    await service.report(seed_report("s", max_readers=4))
    lost = (fault("x", "SourceUnavailable"),)
    requests = fork_request("a"), fork_request("b", (0, 3)), fork_request("c", faults=lost)
    await asyncio.gather(*(service.plan(request) for request in requests))
    assert [1, 2] == sorted(store.plans)


async def test_a_disconnected_caller_does_not_cancel_the_others_plan(service: PlanService) -> None:
    """This includes the first caller, which opened the window."""
    await service.report(seed_report("s"))
    first = asyncio.create_task(service.plan(fork_request("a")))
    second = asyncio.create_task(service.plan(fork_request("b")))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert {"a": ALL} == parts(await second)


async def test_a_failed_plan_fails_for_its_complete_batch(service: PlanService, store: FlakyStore) -> None:
    """Each caller gets the error, and the next window is a new one."""
    await service.report(seed_report("s"))
    store.failures_left = 1
    results = await asyncio.gather(*(service.plan(fork_request(name)) for name in "ab"), return_exceptions=True)
    again = await service.plan(fork_request("a"))
    assert [StoreUnavailable] * 2 == [type(result) for result in results]
    assert {"s": ALL} == parts(again)


async def test_the_same_request_twice_in_one_window_is_one_fork(service: PlanService, store: FlakyStore) -> None:
    """A caller that repeats its request gets the same plan."""
    await service.report(seed_report("s"))
    first, second = await asyncio.gather(service.plan(fork_request("a")), service.plan(fork_request("a")))
    assert [1] == store.plans
    assert parts(first) == parts(second)


COLD = [
    (SNAPSHOT, [{"snapshot": ((0, 12),)}, {"a": ALL}, {"b": ALL}]),
    (CHECKPOINT, [{"checkpoint": ALL}, {"a": ALL}, {"b": ALL}]),
    (LOADER, [{"loader": ALL}, {"a": ALL}, {"b": ALL}]),
]


@pytest.mark.parametrize(("storage", "expected"), COLD)
@pytest.mark.parametrize("batch_s", [0.0, 0.02])
async def test_one_target_of_a_cold_group_is_elected(
    time: FakeTime, storage: object, expected: list[object], batch_s: float
) -> None:
    """Storage is read once, whether targets arrive together or one after another."""
    service = make_service(time, batch_window_s=batch_s)
    requests = [fork_request(name, storage=storage_candidates(storage)) for name in "abc"]  # type: ignore[arg-type]
    if batch_s:
        plans = list(await asyncio.gather(*(service.plan(request) for request in requests)))
    else:
        plans = [await service.plan(request) for request in requests]
    assert expected == [parts(plan) for plan in plans]


async def test_a_batch_shares_a_snapshot_in_a_ring(service: PlanService) -> None:
    """With enough chunks for two, each reads half."""
    requests = [fork_request(name, storage=storage_candidates(SNAPSHOT), chunk_count=20) for name in "ab"]
    plans = await asyncio.gather(*(service.plan(request) for request in requests))
    low, high = ((0, 10),), ((10, 20),)
    assert [{"snapshot": low, "b": high}, {"snapshot": high, "a": low}] == [parts(plan) for plan in plans]


async def test_a_missing_leader_is_replaced_by_a_follower(time: FakeTime) -> None:
    """The follower reads missing chunks from storage, and the next one reads from it."""
    service = make_service(time)
    for name in "abc":
        await service.plan(fork_request(name, storage=storage_candidates(CHECKPOINT)))
    await service.remove("a")
    report_fields: dict[str, Any] = {
        "weights_id": None,
        "provisional_id": ORIGIN,
        "storage": storage_candidates(CHECKPOINT),
    }
    await service.report(report("c", (0, 4), **report_fields))
    faults = (fault("a", "SourceUnavailable"),)
    first = await service.plan(fork_request("b", (0, 5), faults=faults, **report_fields))
    second = await service.plan(fork_request("c", (0, 4), **report_fields))
    assert {"checkpoint": ((5, 12),)} == parts(first)
    assert {"b": ((4, 12),)} == parts(second)
    assert ORIGIN == first.provisional_id == second.provisional_id


async def test_an_elected_reader_whose_storage_fails_is_replaced(time: FakeTime) -> None:
    """The other is elected when it replans, and the first reads from it."""
    service = make_service(time)
    for name in "ab":
        await service.plan(fork_request(name, storage=storage_candidates(CHECKPOINT)))
    failed = (fault("a", "StorageError", "storage"),)
    unplanned = await service.plan(fork_request("a", faults=failed, storage=storage_candidates(CHECKPOINT)))
    elected = await service.plan(fork_request("b", storage=storage_candidates(CHECKPOINT)))
    follower = await service.plan(fork_request("a", storage=storage_candidates(CHECKPOINT)))
    assert {} == parts(unplanned)
    assert {"checkpoint": ALL} == parts(elected)
    assert {"b": ALL} == parts(follower)


async def test_without_storage_no_target_is_elected(service: PlanService) -> None:
    """Each gets the reason immediately."""
    plans = await asyncio.gather(*(service.plan(fork_request(name)) for name in "ab"))
    for plan in plans:
        assert {} == parts(plan)
        assert plan.retry_after_s is None


async def test_a_request_that_cannot_be_planned_does_not_fail_the_others(
    time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are planned separately, and only the faulty one fails."""
    original_plan = group_plan.plan

    def plan(group: Any, demands: Any, now: float) -> Any:
        if any(demand.fork_id == "fork-bad" for demand in demands):
            raise OverflowError("number out of range")
        return original_plan(group, demands, now)

    monkeypatch.setattr(group_plan, "plan", plan)
    service = make_service(time, batch_window_s=0.02)
    await service.report(seed_report("s"))
    good, bad = await asyncio.gather(
        service.plan(fork_request("a")),
        service.plan(fork_request("bad")),
        return_exceptions=True,
    )
    assert isinstance(good, Plan)
    assert {"s": ALL} == parts(good)
    assert OverflowError is type(bad)


def reported(count: int) -> ForkProgress:
    """Return progress of `count` chunks, read at 1 MB/s during the last second."""
    return ForkProgress(verified=((0, count),), bytes_read=count << 20, bytes_per_s=1e6)


def read_rate(service: PlanService, name: str) -> float | None:
    """Return the rate by which the policy judges a target."""
    record = service.state.instance(name)
    assert record is not None
    return record.read_rate


async def test_a_rate_that_is_partly_older_than_the_plan_does_not_count(time: FakeTime) -> None:
    """After a new plan, a target is not judged by what its former sources sent, until a second has passed."""
    service = make_service(time)
    await service.report(seed_report("s"))
    await service.plan(fork_request("a"))
    await service.progress("fork-a", reported(1))
    first = read_rate(service, "a")
    await service.plan(fork_request("a", (0, 1)))
    time.now += 0.9
    await service.progress("fork-a", reported(2))
    early = read_rate(service, "a")
    time.now += 0.2
    await service.progress("fork-a", reported(3))
    assert 1e6 == first
    assert early is None
    assert 1e6 == read_rate(service, "a")
