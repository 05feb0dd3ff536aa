"""State and commits of the store in memory, and the errors of creating one in Redis."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from pydantic import SecretStr

from planner.app import make_store
from planner.core.records import ForkRecord, StoreChange
from planner.core.state import PlannerState
from planner.store.base import CommitConflict
from planner.store.memory import MemoryStore
from planner.store.redis import RedisStore
from rfork.errors import MissingExtra, SettingsError
from rfork.schema import ForkState, Rank
from rfork.settings import PlannerSettings
from tests.unit.planner.builders import FakeTime
from tests.unit.planner.records import GROUP, fork, instance


def names(forks: list[ForkRecord]) -> list[str]:
    """Return the forks' ids."""
    return [record.fork_id for record in forks]


@pytest.fixture
def state() -> PlannerState:
    """A state that keeps two finished forks."""
    return PlannerState(max_finished_forks=2)


def test_only_the_last_finished_forks_are_kept(state: PlannerState) -> None:
    """The oldest is dropped first; running forks are never dropped."""
    state.apply(StoreChange(forks=tuple(fork(name) for name in ("live", "a", "b", "c"))))
    state.apply(StoreChange(forks=tuple(fork(name, ended=True) for name in ("a", "c", "b"))))
    assert ["live", "b", "c"] == names(state.forks())
    assert ["live"] == names(state.live_forks())


def test_a_resumed_fork_is_not_dropped(state: PlannerState) -> None:
    """It no longer counts as finished."""
    state.apply(StoreChange(forks=(fork("a", ended=True), fork("a"))))
    state.apply(StoreChange(forks=tuple(fork(name, ended=True) for name in ("b", "c", "d"))))
    assert ["a", "c", "d"] == names(state.forks())
    assert ["a"] == names(state.live_forks())


def test_instances_expire_in_the_order_of_their_reports(state: PlannerState) -> None:
    """A new report moves an instance to the end; others are not inspected."""
    state.apply(StoreChange(instances=(instance("a"), instance("b", seen_at=1), instance("c", seen_at=2))))
    state.apply(StoreChange(instances=(instance("a", seen_at=3),)))
    silent = {now: [each.report.instance_id for each in state.overdue_instances(now)] for now in (10, 11, 12.5)}
    assert {10: [], 11: ["b"], 12.5: ["b", "c"]} == silent


def test_only_running_forks_are_overdue(state: PlannerState) -> None:
    """Finished forks, and forks that have reported since, are not overdue."""
    state.apply(StoreChange(forks=(fork("a"), fork("b", seen_at=1), fork("c"))))
    state.apply(StoreChange(forks=(fork("c", ended=True), fork("a", seen_at=2))))
    assert ["b"] == names(list(state.overdue_forks(since=1.5)))


def test_an_instance_has_one_running_fork(state: PlannerState) -> None:
    """It is found by its target until it ends."""
    state.apply(StoreChange(forks=(fork("a"),)))
    before = state.live_fork_of("of-a")
    state.apply(StoreChange(forks=(fork("a", ended=True),)))
    assert fork("a") == before
    assert state.live_fork_of("of-a") is None
    assert state.live_fork_of("unknown") is None


def test_a_group_exists_while_it_has_members(state: PlannerState) -> None:
    """An instance that changes its rank leaves the old group; an empty group is removed."""
    state.apply(StoreChange(instances=(instance("a"), instance("b"))))
    state.apply(StoreChange(instances=(instance("b", rank=Rank(tp=1, tp_size=2)),)))
    parted = {group.rank_key: sorted(group.sources) for group in state.groups()}
    others = state.other_ranks(GROUP)
    state.apply(StoreChange(removed=("a", "b", "never-known")))
    other = Rank(tp=1, tp_size=2).key
    assert {GROUP.rank_key: ["a"], other: ["b"]} == parted
    assert (other,) == others
    assert [] == state.groups()
    assert 0 == state.instance_count


def test_listeners_receive_each_fork_record_until_unsubscribed(state: PlannerState) -> None:
    """Each record arrives once, in order."""
    notified: list[ForkState] = []
    stop = state.subscribe(lambda record: notified.append(record.state))
    state.apply(StoreChange(forks=(fork("a"),)))
    state.apply(StoreChange(forks=(fork("a", ended=True),)))
    stop()
    state.apply(StoreChange(forks=(fork("b"),)))
    assert ["planning", "finished"] == notified


def test_clear_keeps_only_the_listeners(state: PlannerState) -> None:
    """Later records behave as in a new state."""
    notified: list[str] = []
    state.subscribe(lambda record: notified.append(record.fork_id))
    state.apply(StoreChange(instances=(instance("a"),), forks=(fork("a"), fork("b", ended=True))))
    state.clear()
    assert [] == state.instances()
    assert [] == state.forks()
    assert [] == state.live_forks()
    assert [] == state.groups()
    assert state.live_fork_of("of-a") is None
    state.apply(StoreChange(instances=(instance("c"),), forks=(fork("c"),)))
    assert ["c"] == [each.report.instance_id for each in state.overdue_instances(10)]
    assert ["a", "b", "c"] == notified


async def test_the_second_of_two_changes_based_on_one_version_is_rejected() -> None:
    """Nothing of it is applied; based on the current version, it is."""
    store = MemoryStore(FakeTime().clock, max_finished_forks=10)
    change = StoreChange(forks=(fork("a"),), group=GROUP, version=store.version(GROUP))
    second = replace(change, instances=(instance("late"),), forks=(fork("b"),))
    await store.commit(change)
    with pytest.raises(CommitConflict):
        await store.commit(second)
    assert ["a"] == names(store.state.forks())
    assert 0 == store.state.instance_count
    await store.commit(replace(second, version=store.version(GROUP)))
    assert ["a", "b"] == names(store.state.forks())
    assert 1 == store.state.instance_count


async def test_a_change_without_a_group_depends_on_no_version() -> None:
    """Heartbeats do not invalidate plans."""
    store = MemoryStore(FakeTime().clock, max_finished_forks=10)
    planned = StoreChange(forks=(fork("a"),), group=GROUP, version=store.version(GROUP))
    await store.commit(StoreChange(instances=(instance("a"),)))
    await store.commit(StoreChange(removed=("a",)))
    await store.commit(planned)
    assert 0 == store.state.instance_count
    assert ["a"] == names(store.state.forks())


async def test_the_memory_store_is_always_ready_and_uses_the_monotonic_clock() -> None:
    """There is nothing to connect to."""
    time = FakeTime()
    store = MemoryStore(time.clock, max_finished_forks=1)
    await store.start()
    time.now += 5
    now, ready = store.now(), store.ready
    await store.stop()
    assert time.now == now
    assert ready


def test_without_the_redis_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised when the store is created, not when the planner is imported."""
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in [name for name in sys.modules if name.startswith("redis.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "planner.store.redis", raising=False)
    with pytest.raises(MissingExtra, match="the redis package is not available") as error:
        make_store(PlannerSettings(store="redis://h", lease_keys=(SecretStr("s" * 32),)), FakeTime().clock)
    assert "pip install 'rfork[redis]'" == error.value.hint


@pytest.mark.parametrize("url", ["redis://user:hush@h:port/0", "http://user:hush@h/0"])
def test_an_invalid_redis_url_is_a_settings_error(url: str) -> None:
    """It names the variable and never shows the password."""
    with pytest.raises(SettingsError, match="RFORK_PLANNER_STORE") as error:
        RedisStore(url, FakeTime().clock, max_finished_forks=1, timeout_s=1)
    assert "hush" not in f"{error.value} {error.value.hint}"
