from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from planner.state import PlannerState
from planner.store.base import CommitConflict, StoreChange
from planner.store.memory import MemoryStore
from planner.store.records import ForkRecord
from planner.store.redis import RedisStore
from rfork.errors import MissingExtra, SettingsError
from rfork.schema import Rank
from rfork.schema.types import ForkState
from tests.unit.planner.builders import FakeTime
from tests.unit.planner.records import GROUP, fork, instance


def names(forks: list[ForkRecord]) -> list[str]:
    """Their ids."""
    return [record.fork_id for record in forks]


@pytest.fixture
def state() -> PlannerState:
    """Keeps two forks that ended."""
    return PlannerState(keep_forks=2)


def test_only_the_last_ended_forks_are_kept(state: PlannerState) -> None:
    """The oldest to end goes first; forks under way never go."""
    state.apply(forks=[fork(name) for name in ("live", "a", "b", "c")])
    state.apply(forks=[fork(name, ended=True) for name in ("a", "c", "b")])
    assert (["live", "b", "c"], ["live"]) == (names(state.forks()), names(state.live_forks()))


def test_a_fork_that_came_back_to_life_is_not_dropped_as_ended(state: PlannerState) -> None:
    """Its place among the ended ones is taken back."""
    state.apply(forks=[fork("a", ended=True), fork("a")])
    state.apply(forks=[fork(name, ended=True) for name in ("b", "c", "d")])
    assert (["a", "c", "d"], ["a"]) == (names(state.forks()), names(state.live_forks()))


def test_instances_fall_silent_in_the_order_they_were_heard(state: PlannerState) -> None:
    """One that was heard again goes to the end; who is not due is not looked at."""
    state.apply([instance("a"), instance("b", seen_at=1), instance("c", seen_at=2)])
    state.apply([instance("a", seen_at=3)])
    silent = {now: [each.report.instance_id for each in state.overdue_instances(now)] for now in (10, 11, 12.5)}
    assert {10: [], 11: ["b"], 12.5: ["b", "c"]} == silent


def test_silent_forks_are_those_under_way(state: PlannerState) -> None:
    """A fork that ended is silent for good; one that reported since is not silent."""
    state.apply(forks=[fork("a"), fork("b", seen_at=1), fork("c")])
    state.apply(forks=[fork("c", ended=True), fork("a", seen_at=2)])
    assert ["b"] == names(list(state.overdue_forks(since=1.5)))


def test_an_instance_has_one_fork_under_way(state: PlannerState) -> None:
    """It is found by its target until it ends."""
    state.apply(forks=[fork("a")])
    before = state.live_fork_of("of-a")
    state.apply(forks=[fork("a", ended=True)])
    assert (fork("a"), None, None) == (before, state.live_fork_of("of-a"), state.live_fork_of("nobody"))


def test_a_group_lasts_as_long_as_its_members(state: PlannerState) -> None:
    """An instance that changes its rank leaves the old group; the last to go takes the group along."""
    state.apply([instance("a"), instance("b")])
    state.apply([instance("b", rank=Rank(tp=1, tp_size=2))])
    parted = {group.rank_key: sorted(group.sources) for group in state.groups()}
    others = state.other_ranks(GROUP)
    state.apply(removed=["a", "b", "never-known"])
    other = Rank(tp=1, tp_size=2).key
    assert ({GROUP.rank_key: ["a"], other: ["b"]}, (other,), [], 0) == (
        parted, others, state.groups(), state.instance_count,
    )  # fmt: skip


def test_listeners_hear_of_each_fork_record_until_they_stop(state: PlannerState) -> None:
    """Each record once, in order."""
    notified: list[ForkState] = []
    stop = state.subscribe(lambda record: notified.append(record.state))
    state.apply(forks=[fork("a")])
    state.apply(forks=[fork("a", ended=True)])
    stop()
    state.apply(forks=[fork("b")])
    assert ["planning", "finished"] == notified


def test_clear_forgets_everything_but_the_listeners(state: PlannerState) -> None:
    """What is put afterwards is as in a new state."""
    notified: list[str] = []
    state.subscribe(lambda record: notified.append(record.fork_id))
    state.apply([instance("a")], [fork("a"), fork("b", ended=True)])
    state.clear()
    left = (state.instances(), state.forks(), state.live_forks(), state.groups(), state.live_fork_of("of-a"))
    state.apply([instance("c")], [fork("c")])
    assert (([], [], [], [], None), ["c"], ["a", "b", "c"]) == (
        left, [each.report.instance_id for each in state.overdue_instances(10)], notified,
    )  # fmt: skip


async def test_the_second_of_two_changes_made_from_one_version_is_refused() -> None:
    """Nothing of it is kept; made anew from the version there is, it is."""
    store = MemoryStore(FakeTime().clock, keep_forks=10)
    change = StoreChange(forks=(fork("a"),), group=GROUP, version=store.version(GROUP))
    second = replace(change, instances=(instance("late"),), forks=(fork("b"),))
    await store.commit(change)
    with pytest.raises(CommitConflict):
        await store.commit(second)
    refused = (names(store.state.forks()), store.state.instance_count)
    await store.commit(replace(second, version=store.version(GROUP)))
    assert ((["a"], 0), ["a", "b"], 1) == (refused, names(store.state.forks()), store.state.instance_count)


async def test_a_change_without_a_group_depends_on_no_version() -> None:
    """Heartbeats do not make plans stale."""
    store = MemoryStore(FakeTime().clock, keep_forks=10)
    planned = StoreChange(forks=(fork("a"),), group=GROUP, version=store.version(GROUP))
    await store.commit(StoreChange(instances=(instance("a"),)))
    await store.commit(StoreChange(removed=("a",)))
    await store.commit(planned)
    assert (0, ["a"]) == (store.state.instance_count, names(store.state.forks()))


async def test_memory_is_always_ready_and_tells_the_monotonic_time() -> None:
    """There is nothing to connect to."""
    time = FakeTime()
    store = MemoryStore(time.clock, keep_forks=1)
    await store.start()
    time.now += 5
    now, ready = store.now(), store.ready
    await store.stop()
    assert (time.now, True) == (now, ready)


def test_without_the_redis_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the store is made, not when the planner is imported."""
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in [name for name in sys.modules if name.startswith("redis.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "planner.store.redis_client", raising=False)
    with pytest.raises(MissingExtra, match="the redis package is not available") as error:
        RedisStore("redis://h", FakeTime().clock, keep_forks=1, timeout_s=1)
    assert "pip install 'rfork[redis]'" == error.value.hint


@pytest.mark.parametrize("url", ["redis://user:hush@h:port/0", "http://user:hush@h/0"])
def test_a_url_that_names_no_redis_is_a_settings_error(url: str) -> None:
    """It names the variable and never shows the password."""
    with pytest.raises(SettingsError, match="RFORK_PLANNER_STORE") as error:
        RedisStore(url, FakeTime().clock, keep_forks=1, timeout_s=1)
    assert "hush" not in f"{error.value} {error.value.hint}"
