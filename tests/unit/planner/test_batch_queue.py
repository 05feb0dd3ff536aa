"""Waiting of fork requests for others of their group, without an event loop."""

from __future__ import annotations

import pytest

from planner.core import batch_queue
from planner.core.batch_queue import BatchQueue, window_s
from planner.core.faults import FaultAssessment
from planner.core.records import InstanceRecord, StoreChange
from planner.core.requests import PlanContext
from planner.core.state import PlannerState
from planner.policy.types import Storage
from rfork.image.ranges import Range
from rfork.schema import ChunkAssignment
from tests.unit.planner.builders import CHUNKS, SNAPSHOT, fault, fork_request, storage_candidates
from tests.unit.planner.records import GROUP, scaleup

ALL: tuple[Range, ...] = ((0, CHUNKS),)
PART: tuple[Range, ...] = ((0, CHUNKS - 1),)
NO_FAULTS = FaultAssessment({}, {}, (), {})


def context(
    name: str,
    *storage: Storage,
    is_replan: bool = False,
    is_arrival: bool = False,
    current: tuple[Range, ...] = (),
    **changes: object,
) -> PlanContext:
    """Return a validated request of `fork-NAME`; a replan has lost a source, unless it reads `current` from one."""
    faults = (fault("x", "SourceUnavailable"),) if is_replan and not current else ()
    request = fork_request(name, storage=storage_candidates(*storage), faults=faults, **changes)
    if current:
        share = ChunkAssignment(source_id="s", chunks=current)
        request = request.model_copy(update={"current_assignments": (share,)})
    target = InstanceRecord(request.instance, seen_at=0.0, ttl_s=10.0, plan_requested=True)
    return PlanContext(request, target, False, None, NO_FAULTS, is_scaleup_arrival=is_arrival)


def queue(min_wait_s: float = 0.05, replicas: int = 0, expires_at: float = 900.0) -> BatchQueue:
    """Return a queue, with so many replicas announced, which waits 8 seconds for them."""
    state = PlannerState(max_finished_forks=1)
    if replicas:
        state.apply(StoreChange(scaleups=(scaleup("up", replicas, expires_at=expires_at),)))
    return BatchQueue(state, min_wait_s, 8.0)


def drain(waiting: BatchQueue, now: float) -> list[float]:
    """Return how long the queue waits before each of its wake-ups until its batches are due."""
    waits, store_now = [], 0.0
    while (wake_at := waiting.wake_at(now, store_now)) < float("inf"):
        waits.append(round(wake_at - now, 6))
        now = wake_at
        waiting.pop_due(now, store_now)
    return waits


WAITS = [
    (1, 0.5, (), [[0.002]] * 4),
    (1, 0.04, (), [[0.002], [0.05], [0.05], [0.05]]),
    (1, 0.5, (SNAPSHOT,), [[0.05]] * 4),
    (3, 0.5, (), [[0.05], [0.3], [0.6], [0.9]]),
    (3, 0.5, (SNAPSHOT,), [[0.05], [0.3], [0.6], [0.9]]),
]


@pytest.mark.parametrize(("together", "apart_s", "storage", "expected"), WAITS)
def test_the_window_grows_only_while_several_requests_arrive(
    together: int, apart_s: float, storage: tuple[Storage, ...], expected: list[list[float]]
) -> None:
    """A single request hardly waits, if none came just before and it has no storage."""
    waiting, waits, now = queue(), [], 0.0
    for moment in range(4):
        for each in range(together):
            waiting.add(context(f"t{moment}-{each}", *storage), now, 0.0)
        waits.append(drain(waiting, now))
        now += apart_s
    assert expected == waits


def test_the_window_is_bounded() -> None:
    """It is three fifths of the burst's age, within the minimum and one second."""
    assert [0.05, 0.3, 1.0] == [window_s(age_s, 0.05) for age_s in (0.0, 0.5, 100.0)]


def test_requests_that_must_not_wait_are_not_queued() -> None:
    """Without a window no request waits, nor does a holder's with one."""
    assert queue().add(context("a", holder="h"), 0.0, 0.0) is None
    assert queue().add(context("a", is_replan=True, holder="h"), 0.0, 0.0) is None
    assert queue(min_wait_s=0).add(context("a", is_replan=True), 0.0, 0.0) is None
    assert queue(min_wait_s=0).add(context("a"), 0.0, 0.0) is None
    assert queue(min_wait_s=0, replicas=2).add(context("a"), 0.0, 0.0) is None


REPLANS = [
    ("one that lost its source", [None], [0.002]),
    ("several that lost theirs", [None, None], [0.01]),
    ("one that reads on", [ALL], [0.05]),
    ("several that read on", [ALL, ALL], [0.05]),
    ("one that lacks a source for some chunks", [PART], [0.002]),
    ("one that reads on, and one that lost its source", [ALL, None], [0.01]),
    ("the same, the other order", [None, ALL], [0.01]),
]


@pytest.mark.parametrize(("current", "expected"), [row[1:] for row in REPLANS], ids=[row[0] for row in REPLANS])
def test_replans_wait_as_long_as_their_targets_lose_little(
    current: list[tuple[Range, ...] | None], expected: list[float]
) -> None:
    """A single target without a source hardly waits, and one that reads on waits longest."""
    waiting = queue(min_wait_s=0.01)
    for number, chunks in enumerate(current):
        waiting.add(context(f"t{number}", is_replan=True, current=chunks or ()), 0.0, 0.0)
    assert expected == drain(waiting, 0.0)


def test_a_lost_source_ends_the_wait_of_those_that_read_on() -> None:
    """They are planned together, at the time at which it is due; a later one is not planned earlier than that."""
    waiting = queue(min_wait_s=0.01)
    batch = waiting.add(context("a", is_replan=True, current=ALL), 0.0, 0.0)
    waiting.add(context("b", is_replan=True), 0.03, 0.0)
    waiting.add(context("c", is_replan=True), 0.035, 0.0)
    assert [] == waiting.pop_due(0.039, 0.0)
    assert [batch] == waiting.pop_due(0.04, 0.0)


def test_a_replan_that_stays_alone_is_planned_at_its_own_time() -> None:
    """It does not wait for the window of the one that ended."""
    waiting = queue(min_wait_s=0.01)
    waiting.add(context("a", is_replan=True, current=ALL), 0.0, 0.0)
    waiting.add(context("b", is_replan=True), 0.02, 0.0)
    waiting.remove("fork-a")
    assert 0.03 == pytest.approx(waiting.wake_at(0.02, 0.0))


def test_replans_and_first_plans_are_separate_batches() -> None:
    """First plans may wait for up to a second."""
    waiting = queue()
    arrivals = waiting.add(context("a"), 0.0, 0.0)
    replans = waiting.add(context("b", is_replan=True), 0.0, 0.0)
    assert arrivals is not replans
    assert replans is waiting.add(context("c", is_replan=True), 0.0, 0.0)


def test_replans_do_not_prolong_the_window_of_arrivals() -> None:
    """A burst consists of first plans."""
    waiting = queue()
    for moment in range(4):
        for name in "ab":
            waiting.add(context(name, is_replan=True), moment * 0.5, 0.0)
        drain(waiting, moment * 0.5)
    waiting.add(context("c"), 2.0, 0.0)
    assert [0.002] == drain(waiting, 2.0)


def test_a_replan_waits_for_no_scale_up() -> None:
    """Not even that of an announced replica."""
    waiting = queue(min_wait_s=0.01, replicas=2)
    waiting.add(context("a", is_replan=True, is_arrival=True), 0.0, 0.0)
    assert not waiting.awaits_scaleup
    assert [0.002] == drain(waiting, 0.0)


def test_a_second_request_prolongs_the_wait_of_the_first() -> None:
    """Without it the first would be planned after two milliseconds."""
    waiting = queue()
    batch = waiting.add(context("a"), 0.0, 0.0)
    assert batch is waiting.add(context("b"), 0.001, 0.0)
    assert [] == waiting.pop_due(0.002, 0.0)
    assert [batch] == waiting.pop_due(0.05, 0.0)
    assert [] == waiting.pop_due(1.0, 0.0)


def test_a_full_batch_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are planned, each at its own time."""
    monkeypatch.setattr(batch_queue, "MAX_BATCH", 2)
    waiting = queue()
    first, _, second = (waiting.add(context(name), 0.0, 0.0) for name in "abc")
    assert first is not second
    assert [first, second] == waiting.pop_due(1.0, 0.0)


def test_an_ended_fork_leaves_its_batch() -> None:
    """The others of the batch are planned without it."""
    waiting = queue()
    batch = waiting.add(context("a"), 0.0, 0.0)
    waiting.add(context("b"), 0.0, 0.0)
    waiting.remove("fork-a")
    assert batch is not None
    assert ["b"] == list(batch.requests)


def test_announced_replicas_are_waited_for_until_the_limit() -> None:
    """The wait does not depend on the number of requests so far."""
    waiting = queue(min_wait_s=0, replicas=2)
    batch = waiting.add(context("a", is_arrival=True), 0.0, 0.0)
    assert waiting.awaits_scaleup
    assert 8.0 == waiting.wake_at(0.0, 0.0)
    assert [] == waiting.pop_due(7.9, 0.0)
    assert [batch] == waiting.pop_due(8.0, 0.0)
    assert not waiting.awaits_scaleup


def test_the_expiry_of_a_scale_up_ends_the_wait() -> None:
    """It is on the clock of the records, which may differ from the clock of this process."""
    waiting = queue(min_wait_s=0, replicas=2, expires_at=105.0)
    batch = waiting.add(context("a", is_arrival=True), 0.0, 100.0)
    assert 5.0 == waiting.wake_at(0.0, 100.0)
    assert [] == waiting.pop_due(4.9, 104.9)
    assert [batch] == waiting.pop_due(5.0, 105.0)


def test_the_last_arrival_ends_the_wait() -> None:
    """Once the records contain it."""
    state = PlannerState(max_finished_forks=1)
    state.apply(StoreChange(scaleups=(scaleup("up", 1),)))
    waiting = BatchQueue(state, 0.0, 8.0)
    only = context("a", is_arrival=True)
    batch = waiting.add(only, 0.0, 0.0)
    before = waiting.pop_due(0.0, 0.0)
    state.apply(StoreChange(instances=(only.target,)))
    assert GROUP == only.group
    assert [] == before
    assert [batch] == waiting.pop_due(0.0, 0.0)
