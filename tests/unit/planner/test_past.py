"""What forks told outlives the instances of their group, for a while and in every store alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from planner.past import MOST_GONE, Past, PastGroups
from planner.previews import known, snapshot
from planner.state import State
from planner.store.base import Change, Store
from planner.store.exchange import Contents, Entry, body_of
from planner.store.memory import MemoryStore
from planner.store.mirror import Mirror
from planner.store.records import ForkRecord
from rfork.wire import ForkFinish, PreviewRequest
from tests.unit.planner.builders import CHUNKS, FakeTime, ask, make_registry, whole
from tests.unit.planner.records import GROUP, fork, instance

SIZE = CHUNKS << 20
CHECKPOINT = "checkpoint:file:///c"


def ended(name: str, seconds: float, source: str) -> ForkRecord:
    """A fork of the group that read its whole image there."""
    finish = ForkFinish(outcome="forked", seconds=seconds, bytes_read=SIZE, sources={source: SIZE})
    return fork(name, image_bytes=SIZE, finish=finish)


def told(past: Past) -> tuple[float | None, float | None, float, int, int]:
    """All that is known of a group's forks."""
    durations = past.durations
    return durations.storage_s, durations.fork_s, durations.saved_s, past.storage_bytes, past.forked_bytes


LIFE = [
    Change(instances=(instance("s"),)),
    Change(instances=(instance("of-a"), instance("of-b")), forks=(fork("a"), fork("b"))),
    Change(forks=(ended("a", 9.0, CHECKPOINT),)),
    Change(forks=(ended("b", 2.0, "s"),)),
    Change(gone=("s", "of-a", "of-b")),
]
"""One reads storage, one reads a seed, and then all are removed."""
KNOWN = (9.0, 2.0, 7.0, SIZE, SIZE)


async def live_in_memory() -> State:
    """The state of a planner that runs alone."""
    store: Store = MemoryStore(FakeTime().clock, keep_forks=10)
    for change in LIFE:
        await store.commit(change)
    return store.state


def live_in_a_mirror() -> State:
    """The state of a replica that saw the same changes come by way of the store."""
    mirror = Mirror(FakeTime().clock, keep_forks=10, patience_s=10)
    mirror.fill(contents())
    for number, change in enumerate(LIFE, start=1):
        known = {each.fork_id: each for each in mirror.state.forks()}
        mirror.apply(Entry(number, body_of(change, {}, known)))
    return mirror.state


def load_in_a_mirror() -> State:
    """The state of a replica that starts when all is over."""
    mirror = Mirror(FakeTime().clock, keep_forks=10, patience_s=10)
    mirror.fill(contents(ended("a", 9.0, CHECKPOINT), ended("b", 2.0, "s")))
    return mirror.state


def contents(*forks: ForkRecord) -> Contents:
    """A store without instances, in which these forks ended."""
    names = tuple(each.fork_id for each in forks)
    return Contents("e", 0, 0.0, {}, dict(zip(names, forks, strict=True)), {}, 0, names)


@pytest.mark.parametrize("kind", ["memory", "followed", "loaded"])
async def test_a_model_that_comes_back_finds_what_was_known_of_it(kind: str) -> None:
    """With no instance, and with a new one, whichever store it is and whenever the replica began."""
    made = await live_in_memory() if kind == "memory" else None
    state = made or (live_in_a_mirror() if kind == "followed" else load_in_a_mirror())
    gone = told(state.group(GROUP).past), [past.saved_s for past in state.pasts()], state.groups()
    state.apply([instance("new")])
    assert ((KNOWN, [7.0], []), KNOWN, [7.0]) == (
        gone, told(state.group(GROUP).past), [past.saved_s for past in state.pasts()],
    )  # fmt: skip


def test_a_fork_that_outlives_its_group_is_counted_once() -> None:
    """It was given up with its instance, and said later how it ended."""
    state = State(keep_forks=10)
    state.apply([instance("of-a")], [fork("a", image_bytes=SIZE)])
    finish = ForkFinish(outcome="interrupted", seconds=1, bytes_read=0)
    state.apply(forks=[fork("a", image_bytes=SIZE, finish=finish, lost=True)], gone=["of-a"])
    given_up = told(state.group(GROUP).past)
    for _ in range(2):
        state.apply(forks=[ended("a", 9.0, CHECKPOINT)])
    assert ((None, None, 0.0, 0, 0), (9.0, None, 0.0, SIZE, 0)) == (
        given_up, told(state.group(GROUP).past),
    )  # fmt: skip


def test_clearing_forgets_the_past() -> None:
    """The store is loaded anew, and tells it again."""
    state = load_in_a_mirror()
    state.clear()
    assert [] == state.pasts()


def pasts(count: int) -> Iterator[tuple[str, Past]]:
    """Of models that each forked once."""
    for number in range(count):
        past = Past()
        past.count(*_ending(ended("a", 1.0, "s")))
        yield f"model-{number}", past


def _ending(record: ForkRecord) -> tuple[ForkRecord, ForkFinish]:
    assert record.finish is not None
    return record, record.finish


def kept(groups: PastGroups, models: Iterable[str]) -> list[str]:
    """Those of the models of which something is known."""
    return [model for model in models if not groups.of(GROUP._replace(model=model)).empty]


def test_the_past_of_the_last_groups_is_kept() -> None:
    """Of more than `MOST_GONE` the one goes that has been gone for longest."""
    groups, models = PastGroups(), list(pasts(MOST_GONE + 1))
    for model, past in models[:-1]:
        groups.keep(GROUP._replace(model=model), past)
    groups.keep(GROUP._replace(model="model-0"), groups.take(GROUP._replace(model="model-0")))
    groups.keep(GROUP._replace(model=models[-1][0]), models[-1][1])
    names = [model for model, _ in models]
    assert [name for name in names if name != "model-1"] == kept(groups, names)


def test_groups_without_a_fork_push_out_no_others() -> None:
    """There is nothing to keep of them."""
    groups, (model, past) = PastGroups(), next(pasts(1))
    groups.keep(GROUP._replace(model=model), past)
    for number in range(MOST_GONE):
        groups.keep(GROUP._replace(model=f"other-{number}"), Past())
    assert (["model-0"], 1) == (kept(groups, [model]), len(groups.all()))


def test_savings_are_not_known_before_both_kinds_of_forks_are() -> None:
    """Nor after one alone."""
    past = Past()
    past.count(*_ending(ended("a", 9.0, CHECKPOINT)))
    before = past.saved_s
    past.count(*_ending(ended("b", 10.0, "s")))
    assert (None, -1.0) == (before, past.saved_s)


async def test_after_a_scale_to_nothing_plans_and_metrics_go_on() -> None:
    """A preview knows the speed of storage, and the next fork's saving is counted."""
    registry = make_registry(FakeTime())
    await registry.store.commit(Change(instances=(instance("s"),), forks=(fork("a", image_bytes=SIZE),)))
    await registry.store.commit(Change(forks=(ended("a", 4.0, CHECKPOINT),), gone=("s",)))
    await registry.report(whole("new"))
    (group,) = registry.state.groups()
    taken = snapshot(registry.state, group, PreviewRequest(model="m"), registry.now())
    await registry.ask(ask("b"))
    finish = ForkFinish(outcome="forked", seconds=1, bytes_read=SIZE, sources={"new": SIZE})
    await registry.finish("fork-b", finish)
    text = registry._metrics.exposition((), ()).decode()
    assert (SIZE / 4, True) == (
        known(taken).storage_rate if taken else None, "rfork_planner_saved_seconds_total 3.0" in text,
    )  # fmt: skip
