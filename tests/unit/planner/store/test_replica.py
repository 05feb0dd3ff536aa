"""One planner replica's copy of the store: changes in order, loads, and the shared clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.core.records import ForkRecord, InstanceRecord, StoreChange
from planner.store.messages import (
    FORKS,
    INSTANCES,
    ChangeMessage,
    LogEntry,
    ReplicaOutdated,
    StoreSnapshot,
    body_of,
    group_text,
)
from planner.store.replica import Replica
from rfork.schema import ForkResult, ImageKey
from tests.unit.planner.builders import FakeTime
from tests.unit.planner.records import GROUP, fork, holder, instance, scaleup

OTHER = GROUP._replace(rank_key="other")

TIMEOUT_S = 3.0
UNIX = 1_700_000_000.0


def contents(
    *instances: InstanceRecord,
    forks: tuple[ForkRecord, ...] = (),
    ended: tuple[str, ...] = (),
    epoch: str = "e",
    number: int = 0,
    at: float = UNIX,
) -> StoreSnapshot:
    """Return the contents of Redis."""
    return StoreSnapshot(
        epoch=epoch,
        number=number,
        time=at,
        instances={each.report.instance_id: each for each in instances},
        forks={each.fork_id: each for each in forks},
        versions={GROUP: 7},
        floor=3,
        ended=ended,
    )


def test_bytes_of_finished_forks_are_counted_once_after_each_load() -> None:
    """Reloading does not count them again."""
    finish = ForkResult(outcome="forked", seconds=3, bytes_read=9, sources={"s": 9})
    ended = fork("x", image_bytes=9, finish=finish)
    replica = Replica(FakeTime().clock, max_finished_forks=10, max_staleness_s=TIMEOUT_S)
    for _ in range(2):
        replica.fill(contents(instance("s"), forks=(ended,), ended=("x",)))
    group = replica.state.group(GROUP)
    assert 9 == group.history.forked_bytes
    assert 0 == group.history.storage_bytes
    assert 3.0 == group.history.fork_s


def new(*records: InstanceRecord) -> ChangeMessage:
    """Return a change with complete instances."""
    return ChangeMessage(instances=tuple((each.report.instance_id, INSTANCES.patch(None, each)) for each in records))


def known(replica: Replica) -> list[str]:
    """Return the ids of the instances in its state."""
    return sorted(each.report.instance_id for each in replica.state.instances())


@pytest.fixture
def time() -> FakeTime:
    """This machine's clock."""
    return FakeTime()


@pytest.fixture
def replica(time: FakeTime) -> Replica:
    """A replica of an empty Redis."""
    replica = Replica(time.clock, max_finished_forks=2, max_staleness_s=TIMEOUT_S)
    replica.fill(contents())
    return replica


def test_each_change_is_applied_once(replica: Replica) -> None:
    """The follower and the writer both deliver it."""
    notified: list[str] = []
    replica.state.subscribe(lambda record: notified.append(record.fork_id))
    entry = LogEntry(1, ChangeMessage(forks=(("f", FORKS.patch(None, fork("f"))),), group=group_text(GROUP), version=7))
    replica.apply(entry)
    replica.apply(entry)
    assert ["f"] == notified
    assert 1 == replica.applied
    assert 1 == replica.version(GROUP)
    assert 3 == replica.version(OTHER)


def test_an_empty_group_loses_its_version(replica: Replica) -> None:
    """Its next version is higher than all before: earlier decisions are rejected."""
    there = []
    replica.apply(LogEntry(1, new(instance("a"))))
    replica.apply(LogEntry(2, ChangeMessage(forks=(("f", FORKS.patch(None, fork("f"))),), group=group_text(GROUP))))
    there.append((replica.groups_emptied_by(()), replica.groups_emptied_by(("a",)), replica.version(GROUP)))
    replica.apply(LogEntry(3, ChangeMessage(removed=("a",), emptied=(group_text(GROUP),))))
    there.append((replica.groups_emptied_by(()), replica.groups_emptied_by(("a",)), replica.version(GROUP)))
    assert [([], [GROUP], 2), ([], [], 3)] == there


def test_a_gap_is_an_error_and_changes_nothing(replica: Replica) -> None:
    """The missing changes must be read first."""
    with pytest.raises(ReplicaOutdated, match="change 2 arrived after 0"):
        replica.apply(LogEntry(2, new(instance("a"))))
    assert [] == known(replica)
    assert 0 == replica.applied


def test_an_invalid_change_is_an_error_and_changes_nothing(replica: Replica) -> None:
    """Another planner version may have written it."""
    strange = ("a", {**INSTANCES.patch(None, instance("a")), "colour": '"red"'})
    with pytest.raises(ReplicaOutdated, match="change 1 does not match the local records: InstanceRecord has no part"):
        replica.apply(LogEntry(1, ChangeMessage(instances=(*new(instance("b")).instances, strange))))
    assert [] == known(replica)
    assert 0 == replica.applied


def test_a_patch_of_an_unknown_record_is_ignored(replica: Replica) -> None:
    """Another replica may keep more finished forks."""
    replica.apply(LogEntry(1, ChangeMessage(forks=(("dropped", {"lost": "true"}),))))
    assert replica.state.fork("dropped") is None
    assert 1 == replica.applied


def test_a_load_replaces_everything(replica: Replica) -> None:
    """Records are ordered by last report, and finished forks by their end."""
    replica.apply(LogEntry(1, new(instance("old"))))
    forks = tuple(fork(name, ended=True) for name in "cab")
    live = (fork("late", seen_at=2.0), fork("early", seen_at=1.0))
    replica.fill(
        contents(
            instance("b", seen_at=2.0), instance("a", seen_at=1.0), forks=forks + live, ended=("a", "b", "c"),
            epoch="other", number=40,
        )
    )  # fmt: skip
    assert ["a", "b"] == [each.report.instance_id for each in replica.state.overdue_instances(99)]
    assert ["early", "late"] == [each.fork_id for each in replica.state.live_forks()]
    assert replica.state.fork("a") is None
    assert 40 == replica.applied
    assert 7 == replica.version(GROUP)


def test_a_known_reader_is_not_unplanned_after_loading(replica: Replica) -> None:
    """Forks are loaded before the instances that name them as readers."""
    reader = fork("f", instance_id="target")
    replica.fill(contents(instance("seed", readers=("f", "unheard-of")), instance("target"), forks=(reader,)))
    assert {"unheard-of"} == set(replica.state.group(GROUP).readers["seed"])


def test_the_clock_follows_the_furthest_replica(replica: Replica, time: FakeTime) -> None:
    """It starts at the others' time, runs at this machine's pace, and never goes back."""
    observed = [replica.now()]
    time.now += 2
    observed.append(replica.now())
    replica.mark_synced(UNIX + 1)
    observed.append(replica.now())
    replica.mark_synced(UNIX + 2.5)
    observed.append(replica.now())
    replica.fill(contents(epoch="later", at=5.0))
    observed.append(replica.now())
    assert [UNIX, UNIX + 2, UNIX + 2, UNIX + 2.5, UNIX + 2.5] == observed


def test_events_after_a_change_have_a_later_time(replica: Replica) -> None:
    """A change carries the time of its replica, however far that is ahead."""
    replica.apply(LogEntry(1, new(instance("a")), time=UNIX + 9))
    observed = [replica.now()]
    replica.apply(LogEntry(2, new(instance("b")), time=UNIX + 5))
    observed.append(replica.now())
    assert [UNIX + 9] * 2 == observed


def test_the_clock_stops_while_redis_is_unreachable(replica: Replica, time: FakeTime) -> None:
    """A paused replica treats no instance as silent, and continues from where it stopped."""
    replica.apply(LogEntry(1, new(replace(instance("a"), seen_at=replica.now(), ttl_s=10.0))))
    time.now += 60
    frozen_at, silent = replica.now(), list(replica.state.overdue_instances(replica.now()))
    replica.mark_synced(UNIX)
    time.now += 1
    assert UNIX + TIMEOUT_S == frozen_at
    assert [] == silent
    assert UNIX + TIMEOUT_S + 1 == replica.now()


def test_the_last_complete_scale_up_wins(replica: Replica) -> None:
    """It arrives in a change or in a load, and stays until withdrawn."""
    first, second = scaleup("a", 3), scaleup("a", 2)
    there = []
    replica.apply(LogEntry(1, body_of(StoreChange(scaleups=(first, scaleup("b", 1))), {}, {})))
    there.append(replica.state.scaleups.records())
    replica.apply(LogEntry(2, body_of(StoreChange(scaleups=(second,), withdrawn=("b", "c")), {}, {})))
    there.append(replica.state.scaleups.records())
    replica.fill(replace(contents(number=2), scaleups={"a": first}))
    there.append(replica.state.scaleups.records())
    assert [[first, scaleup("b", 1)], [second], [first]] == there


def test_an_invalid_scale_up_causes_a_reload(replica: Replica) -> None:
    """It is handled like any invalid record."""
    with pytest.raises(ReplicaOutdated, match="change 1 does not match the local records"):
        replica.apply(LogEntry(1, ChangeMessage(scaleups=(("a", "{}"),))))


def test_the_last_complete_holder_wins(replica: Replica) -> None:
    """It arrives in a change or in a load, with its prefetched images, and stays until removed."""
    image = ImageKey("m", "v1", "r", "a" * 32)
    first, second = holder("a"), replace(holder("a", used_bytes=1), prefetched=(image,))
    there = []
    replica.apply(LogEntry(1, body_of(StoreChange(holders=(first, holder("b"))), {}, {})))
    there.append(replica.state.holders.all())
    replica.apply(LogEntry(2, body_of(StoreChange(holders=(second,), removed_holders=("b", "c")), {}, {})))
    there.append(replica.state.holders.all())
    replica.fill(replace(contents(number=2), holders={"a": first}))
    there.append(replica.state.holders.all())
    assert [[first, holder("b")], [second], [first]] == there


def test_an_invalid_holder_causes_a_reload(replica: Replica) -> None:
    """It is handled like any invalid record."""
    with pytest.raises(ReplicaOutdated, match="change 1 does not match the local records"):
        replica.apply(LogEntry(1, ChangeMessage(holders=(("a", "{}"),))))


def test_listeners_are_notified_of_arrivals_announcements_and_loads(replica: Replica) -> None:
    """New instances without a request, and heartbeats, change nothing for scale-ups."""
    notified, reloads = list[str](), replica.state.reloads
    step = "new instance"
    replica.state.subscribe_scaleups(lambda: notified.append(step))
    replica.apply(LogEntry(1, new(instance("a"))))
    step, with_request = "first request", replace(instance("a"), plan_requested=True)
    replica.apply(LogEntry(2, body_of(StoreChange(instances=(with_request,)), {"a": instance("a")}, {})))
    step, heartbeat = "heartbeat", replace(with_request, seen_at=1.0)
    replica.apply(LogEntry(3, body_of(StoreChange(instances=(heartbeat,)), {"a": with_request}, {})))
    step = "announcement"
    replica.apply(LogEntry(4, body_of(StoreChange(scaleups=(scaleup("up", 3),)), {}, {})))
    step = "load"
    replica.fill(contents(number=4))
    assert ["first request", "announcement", "load"] == notified
    assert reloads + 1 == replica.state.reloads
