from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from planner.store.base import Change
from planner.store.codec import FORKS, INSTANCES
from planner.store.exchange import Behind, Body, Contents, Entry, body_of, group_text
from planner.store.mirror import Mirror
from planner.store.records import ForkRecord, InstanceRecord
from rfork.wire import ForkFinish
from tests.unit.planner.builders import FakeTime
from tests.unit.planner.records import GROUP, fork, instance, scaleup

OTHER = GROUP._replace(rank_key="other")

PATIENCE_S = 3.0
UNIX = 1_700_000_000.0


class Hearing:
    """Keeps what a watcher is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def came(self, record: InstanceRecord) -> None:
        """An instance is new, or asks."""
        self.told.append(f"came {record.report.instance_id}")

    def announced(self, models: Iterable[str]) -> None:
        """Scale-ups were changed."""
        self.told.append(f"announced {' '.join(models)}")

    def loaded(self) -> None:
        """Everything may be otherwise."""
        self.told.append("loaded")


def contents(
    *instances: InstanceRecord,
    forks: tuple[ForkRecord, ...] = (),
    ended: tuple[str, ...] = (),
    epoch: str = "e",
    number: int = 0,
    at: float = UNIX,
) -> Contents:
    """All that Redis holds."""
    return Contents(
        epoch=epoch,
        number=number,
        at=at,
        instances={each.report.instance_id: each for each in instances},
        forks={each.fork_id: each for each in forks},
        versions={GROUP: 7},
        floor=3,
        ended=ended,
    )


def test_what_ended_forks_read_is_known_again_after_a_load() -> None:
    """Once, however often everything is read anew."""
    finish = ForkFinish(outcome="forked", seconds=3, bytes_read=9, sources={"s": 9})
    ended = fork("x", image_bytes=9, finish=finish)
    mirror = Mirror(FakeTime().clock, keep_forks=10, patience_s=PATIENCE_S)
    for _ in range(2):
        mirror.fill(contents(instance("s"), forks=(ended,), ended=("x",)))
    group = mirror.state.group(GROUP)
    assert (9, 0, 3.0) == (group.past.forked_bytes, group.past.storage_bytes, group.past.durations.fork_s)


def new(*records: InstanceRecord) -> Body:
    """A change that brings whole instances."""
    return Body(instances=tuple((each.report.instance_id, INSTANCES.patch(None, each)) for each in records))


def known(mirror: Mirror) -> list[str]:
    """The instances in its state."""
    return sorted(each.report.instance_id for each in mirror.state.instances())


@pytest.fixture
def time() -> FakeTime:
    """This machine's clock."""
    return FakeTime()


@pytest.fixture
def mirror(time: FakeTime) -> Mirror:
    """A mirror of an empty Redis."""
    mirror = Mirror(time.clock, keep_forks=2, patience_s=PATIENCE_S)
    mirror.fill(contents())
    return mirror


def test_each_change_is_applied_once(mirror: Mirror) -> None:
    """The follower and the writer both bring it."""
    heard: list[str] = []
    mirror.state.subscribe(lambda record: heard.append(record.fork_id))
    entry = Entry(1, Body(forks=(("f", FORKS.patch(None, fork("f"))),), group=group_text(GROUP), version=7))
    mirror.apply(entry)
    mirror.apply(entry)
    assert (["f"], 1, 1, 3) == (heard, mirror.applied, mirror.version(GROUP), mirror.version(OTHER))


def test_a_group_that_nobody_is_in_loses_its_version(mirror: Mirror) -> None:
    """Its next version is above all that it had: what was decided before is refused."""
    there = []
    mirror.apply(Entry(1, new(instance("a"))))
    mirror.apply(Entry(2, Body(forks=(("f", FORKS.patch(None, fork("f"))),), group=group_text(GROUP))))
    there.append((mirror.emptied_by(()), mirror.emptied_by(("a",)), mirror.version(GROUP)))
    mirror.apply(Entry(3, Body(gone=("a",), emptied=(group_text(GROUP),))))
    there.append((mirror.emptied_by(()), mirror.emptied_by(("a",)), mirror.version(GROUP)))
    assert [([], [GROUP], 2), ([], [], 3)] == there


def test_a_gap_is_told_and_changes_nothing(mirror: Mirror) -> None:
    """What came between must be read first."""
    with pytest.raises(Behind, match="change 2 came after 0"):
        mirror.apply(Entry(2, new(instance("a"))))
    assert ([], 0) == (known(mirror), mirror.applied)


def test_a_change_that_makes_no_record_is_told_and_changes_nothing(mirror: Mirror) -> None:
    """Another version of the planner may have written it."""
    strange = ("a", {**INSTANCES.patch(None, instance("a")), "colour": '"red"'})
    with pytest.raises(Behind, match="change 1 does not fit what is known: InstanceRecord has no part"):
        mirror.apply(Entry(1, Body(instances=(*new(instance("b")).instances, strange))))
    assert ([], 0) == (known(mirror), mirror.applied)


def test_a_patch_of_what_is_not_kept_here_is_passed_over(mirror: Mirror) -> None:
    """Another replica keeps more of the forks that ended."""
    mirror.apply(Entry(1, Body(forks=(("dropped", {"lost": "true"}),))))
    assert (None, 1) == (mirror.state.fork("dropped"), mirror.applied)


def test_everything_anew(mirror: Mirror) -> None:
    """Nothing of what was before stays; the order is that of the last signs of life, and of the ends."""
    mirror.apply(Entry(1, new(instance("old"))))
    forks = tuple(fork(name, ended=True) for name in "cab")
    live = (fork("late", seen_at=2.0), fork("early", seen_at=1.0))
    mirror.fill(
        contents(
            instance("b", seen_at=2.0), instance("a", seen_at=1.0), forks=forks + live, ended=("a", "b", "c"),
            epoch="other", number=40,
        )
    )  # fmt: skip
    assert (["a", "b"], ["early", "late"], None, 40, 7) == (
        [each.report.instance_id for each in mirror.state.silent_instances(99)],
        [each.fork_id for each in mirror.state.live_forks()],
        mirror.state.fork("a"),
        mirror.applied,
        mirror.version(GROUP),
    )


def test_a_reader_that_is_known_is_no_stranger_after_loading(mirror: Mirror) -> None:
    """The instances that name their readers are put after the forks."""
    reader = fork("f", instance_id="target")
    mirror.fill(contents(instance("seed", readers=("f", "unheard-of")), instance("target"), forks=(reader,)))
    assert {"unheard-of"} == set(mirror.state.group(GROUP).readers["seed"])


def test_the_clock_goes_on_with_the_furthest_replica(mirror: Mirror, time: FakeTime) -> None:
    """It begins where the others are, keeps this machine's pace, and never goes back."""
    told = [mirror.now()]
    time.now += 2
    told.append(mirror.now())
    mirror.synced(UNIX + 1)
    told.append(mirror.now())
    mirror.synced(UNIX + 2.5)
    told.append(mirror.now())
    mirror.fill(contents(epoch="later", at=5.0))
    told.append(mirror.now())
    assert [UNIX, UNIX + 2, UNIX + 2, UNIX + 2.5, UNIX + 2.5] == told


def test_what_comes_here_after_a_change_does_not_seem_to_have_come_before_it(mirror: Mirror) -> None:
    """A change brings the time of the replica that made it, however far that is ahead."""
    mirror.apply(Entry(1, new(instance("a")), at=UNIX + 9))
    told = [mirror.now()]
    mirror.apply(Entry(2, new(instance("b")), at=UNIX + 5))
    told.append(mirror.now())
    assert [UNIX + 9] * 2 == told


def test_the_clock_stands_still_while_nothing_is_heard(mirror: Mirror, time: FakeTime) -> None:
    """A replica that was paused calls nobody silent, and goes on from where it stood."""
    mirror.apply(Entry(1, new(replace(instance("a"), seen_at=mirror.now(), forget_s=10.0))))
    time.now += 60
    stood, silent = mirror.now(), list(mirror.state.silent_instances(mirror.now()))
    mirror.synced(UNIX)
    time.now += 1
    assert (UNIX + PATIENCE_S, [], UNIX + PATIENCE_S + 1) == (stood, silent, mirror.now())


def test_scale_ups_come_whole_and_the_last_that_is_said_holds(mirror: Mirror) -> None:
    """With a change, with everything, and until one is withdrawn."""
    first, second = scaleup("a", 3), scaleup("a", 2)
    there = []
    mirror.apply(Entry(1, body_of(Change(scaleups=(first, scaleup("b", 1))), {}, {})))
    there.append(mirror.state.scaleups())
    mirror.apply(Entry(2, body_of(Change(scaleups=(second,), withdrawn=("b", "c")), {}, {})))
    there.append(mirror.state.scaleups())
    mirror.fill(replace(contents(number=2), scaleups={"a": first}))
    there.append(mirror.state.scaleups())
    assert [[first, scaleup("b", 1)], [second], [first]] == there


def test_text_that_is_no_scale_up_ends_in_loading_everything(mirror: Mirror) -> None:
    """As any that fits no record."""
    with pytest.raises(Behind, match="change 1 does not fit what is known"):
        mirror.apply(Entry(1, Body(scaleups=(("a", "{}"),))))


def test_who_watches_is_told_once_everything_is_there(mirror: Mirror) -> None:
    """Who came and what was announced, and that all may be otherwise."""
    watcher = Hearing()
    mirror.state.watch(watcher)
    mirror.apply(Entry(1, new(instance("a"))))
    asked = replace(instance("a"), asked=True)
    mirror.apply(Entry(2, body_of(Change(instances=(asked,)), {"a": instance("a")}, {})))
    mirror.apply(Entry(3, body_of(Change(instances=(replace(asked, seen_at=1.0),)), {"a": asked}, {})))
    mirror.apply(Entry(4, body_of(Change(scaleups=(scaleup("up", 3),)), {}, {})))
    told = list(watcher.told)
    mirror.fill(contents(number=4))
    assert (["came a", "came a", "announced m"], "loaded") == (told, watcher.told[-1])
