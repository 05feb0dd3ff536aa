"""Statistics of forks outlive the instances of their group, in every store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from planner.core.group_history import MAX_RETAINED, GroupHistory, GroupHistoryCache
from planner.core.records import ForkRecord, StoreChange
from planner.core.state import PlannerState
from planner.dry_run import build_scenario, snapshot_group
from planner.store.base import PlannerStore
from planner.store.memory import MemoryStore
from planner.store.messages import LogEntry, StoreSnapshot, body_of
from planner.store.replica import Replica
from rfork.schema import ForkResult, PreviewRequest
from tests.unit.planner.builders import CHUNKS, FakeTime, fork_request, make_service, seed_report
from tests.unit.planner.records import GROUP, fork, instance

SIZE = CHUNKS << 20
CHECKPOINT = "checkpoint:file:///c"


def ended(name: str, seconds: float, source: str) -> ForkRecord:
    """Return a finished fork of the group that read its complete image there."""
    finish = ForkResult(outcome="forked", seconds=seconds, bytes_read=SIZE, sources={source: SIZE})
    return fork(name, image_bytes=SIZE, finish=finish)


def summary(history: GroupHistory) -> tuple[float | None, float | None, float, int, int]:
    """Return all statistics of a group."""
    return (
        history.storage_s,
        history.fork_s,
        history.total_seconds_saved,
        history.storage_bytes,
        history.forked_bytes,
    )


LIFECYCLE = [
    StoreChange(instances=(instance("s"),)),
    StoreChange(instances=(instance("of-a"), instance("of-b")), forks=(fork("a"), fork("b"))),
    StoreChange(forks=(ended("a", 9.0, CHECKPOINT),)),
    StoreChange(forks=(ended("b", 2.0, "s"),)),
    StoreChange(removed=("s", "of-a", "of-b")),
]
"""One fork reads storage, one reads a seed, and then all instances are removed."""
KNOWN = (9.0, 2.0, 7.0, SIZE, SIZE)


async def live_in_memory() -> PlannerState:
    """Return the state of a single planner."""
    store: PlannerStore = MemoryStore(FakeTime().clock, max_finished_forks=10)
    for change in LIFECYCLE:
        await store.commit(change)
    return store.state


def live_in_a_replica() -> PlannerState:
    """Return the state of a replica that received the same changes through the store."""
    replica = Replica(FakeTime().clock, max_finished_forks=10, max_staleness_s=10)
    replica.fill(contents())
    for number, change in enumerate(LIFECYCLE, start=1):
        known = {each.fork_id: each for each in replica.state.forks()}
        replica.apply(LogEntry(number, body_of(change, {}, known)))
    return replica.state


def load_in_a_replica() -> PlannerState:
    """Return the state of a replica that starts afterwards."""
    replica = Replica(FakeTime().clock, max_finished_forks=10, max_staleness_s=10)
    replica.fill(contents(ended("a", 9.0, CHECKPOINT), ended("b", 2.0, "s")))
    return replica.state


def contents(*forks: ForkRecord) -> StoreSnapshot:
    """Return a store without instances in which these forks finished."""
    names = tuple(each.fork_id for each in forks)
    return StoreSnapshot("e", 0, 0.0, {}, dict(zip(names, forks, strict=True)), {}, 0, names)


@pytest.mark.parametrize("store_type", ["memory", "followed", "loaded"])
async def test_a_model_scaled_back_up_keeps_its_statistics(store_type: str) -> None:
    """This holds without and with a new instance, in every store, and for late replicas."""
    match store_type:
        case "memory":
            state = await live_in_memory()
        case "followed":
            state = live_in_a_replica()
        case _:
            state = load_in_a_replica()
    assert KNOWN == summary(state.group(GROUP).history)
    assert [7.0] == [history.seconds_saved for history in state.histories()]
    assert [] == state.groups()
    state.apply(StoreChange(instances=(instance("new"),)))
    assert KNOWN == summary(state.group(GROUP).history)
    assert [7.0] == [history.seconds_saved for history in state.histories()]


def test_a_fork_that_outlives_its_group_is_counted_once() -> None:
    """It was abandoned with its instance, and reported its result later."""
    state = PlannerState(max_finished_forks=10)
    state.apply(StoreChange(instances=(instance("of-a"),), forks=(fork("a", image_bytes=SIZE),)))
    finish = ForkResult(outcome="interrupted", seconds=1, bytes_read=0)
    state.apply(StoreChange(forks=(fork("a", image_bytes=SIZE, finish=finish, abandoned=True),), removed=("of-a",)))
    abandoned = summary(state.group(GROUP).history)
    for _ in range(2):
        state.apply(StoreChange(forks=(ended("a", 9.0, CHECKPOINT),)))
    assert (None, None, 0.0, 0, 0) == abandoned
    assert (9.0, None, 0.0, SIZE, 0) == summary(state.group(GROUP).history)


def test_clearing_removes_histories() -> None:
    """A reload restores them from the store."""
    state = load_in_a_replica()
    state.clear()
    assert [] == state.histories()


def histories(count: int) -> Iterator[tuple[str, GroupHistory]]:
    """Return the histories of models that each forked once."""
    for number in range(count):
        history = GroupHistory()
        history.record(*_ending(ended("a", 1.0, "s")))
        yield f"model-{number}", history


def _ending(record: ForkRecord) -> tuple[ForkRecord, ForkResult]:
    assert record.finish is not None
    return record, record.finish


def remembered_models(groups: GroupHistoryCache, models: Iterable[str]) -> list[str]:
    """Return the models with a kept history."""
    return [model for model in models if not groups.of(GROUP._replace(model=model)).is_empty]


def test_the_most_recent_histories_are_kept() -> None:
    """Beyond `MAX_RETAINED`, the one unused for longest is dropped."""
    groups, models = GroupHistoryCache(), list(histories(MAX_RETAINED + 1))
    for model, history in models[:-1]:
        groups.keep(GROUP._replace(model=model), history)
    groups.keep(GROUP._replace(model="model-0"), groups.pop_group(GROUP._replace(model="model-0")))
    groups.keep(GROUP._replace(model=models[-1][0]), models[-1][1])
    names = [model for model, _ in models]
    assert [name for name in names if name != "model-1"] == remembered_models(groups, names)


def test_groups_without_forks_are_not_kept() -> None:
    """They push out no other history."""
    groups, (model, history) = GroupHistoryCache(), next(histories(1))
    groups.keep(GROUP._replace(model=model), history)
    for number in range(MAX_RETAINED):
        groups.keep(GROUP._replace(model=f"other-{number}"), GroupHistory())
    assert ["model-0"] == remembered_models(groups, [model])
    assert 1 == len(groups.all())


def test_savings_need_both_durations() -> None:
    """They are unknown with only one type of fork."""
    history = GroupHistory()
    history.record(*_ending(ended("a", 9.0, CHECKPOINT)))
    before = history.seconds_saved
    history.record(*_ending(ended("b", 10.0, "s")))
    assert before is None
    assert -1.0 == history.seconds_saved


async def test_after_a_scale_to_zero_previews_and_metrics_use_the_history() -> None:
    """A preview knows the speed of storage, and the next fork's saving is counted."""
    service = make_service(FakeTime())
    await service.store.commit(StoreChange(instances=(instance("s"),), forks=(fork("a", image_bytes=SIZE),)))
    await service.store.commit(StoreChange(forks=(ended("a", 4.0, CHECKPOINT),), removed=("s",)))
    await service.report(seed_report("new"))
    (group,) = service.state.groups()
    snapshot = snapshot_group(service.state, group, PreviewRequest(model="m"), service.now())
    await service.plan(fork_request("b"))
    finish = ForkResult(outcome="forked", seconds=1, bytes_read=SIZE, sources={"new": SIZE})
    await service.finish("fork-b", finish)
    text = service._metrics.exposition((), ()).decode()
    assert SIZE / 4 == (build_scenario(snapshot).storage_rate if snapshot else None)
    assert "rfork_planner_saved_seconds_total 3.0" in text


def loaded(name: str, seconds: float) -> ForkRecord:
    """Return a fork that was abandoned after a second, and whose own load took the rest."""
    phases = {"transfer": 1.0, "fallback": seconds - 1.0}
    sources = {"s": SIZE // 2, "loader:": SIZE}
    finish = ForkResult(outcome="fallback", seconds=seconds, bytes_read=SIZE, sources=sources, phases=phases)
    return fork(name, image_bytes=SIZE, finish=finish)


def test_the_duration_of_own_loads_is_that_of_the_loads_alone() -> None:
    """Not of the forks that they replaced, and whatever those had read before."""
    history = GroupHistory()
    record = loaded("a", 11.0)
    assert record.finish is not None
    history.record(record, record.finish)
    assert 10.0 == history.own_load_s


def test_the_duration_of_own_loads_follows_recent_ones() -> None:
    """A mean in which the newest load counts for three tenths."""
    history = GroupHistory()
    for record in (loaded("a", 11.0), loaded("b", 21.0)):
        assert record.finish is not None
        history.record(record, record.finish)
    assert 13.0 == history.own_load_s


async def test_a_plan_contains_the_duration_of_own_loads() -> None:
    """So that a target knows how long its own load would take."""
    service = make_service(FakeTime())
    await service.report(seed_report("s"))
    request = fork_request("t")
    plan = await service.plan(request)
    assert plan.own_load_s is None
    await service.finish(request.fork_id, loaded("t", 11.0).finish or pytest.fail("no result"))
    assert 10.0 == (await service.plan(fork_request("u"))).own_load_s
