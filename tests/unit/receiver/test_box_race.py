"""Comparison of a fork across layouts with the engine's own load."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rfork.errors import SlowSources, StorageNotFound
from rfork.receiver import box_race
from rfork.receiver.box_race import FIRST_BOX_S, BoxRace
from rfork.receiver.own_load import OwnLoad

GB = 10**9
IMAGE_BYTES = 10 * GB
OWN_S = 5.0
"""Time of the own load."""


class Session:
    """A fork of one part that receives bytes when a test advances the time."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """Replaces the time of the race, and lets samples end before the next comparison."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of all races."""
    found = Clock()
    monkeypatch.setattr(box_race, "time", found)

    def thread(*, target: Any, args: tuple[int], **_: object) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: target(*args))

    monkeypatch.setattr(box_race, "threading", SimpleNamespace(Thread=thread, Lock=threading.Lock))
    return found


def started(clock: Clock) -> BoxRace:
    """Return a race that has begun, after the time that a target needs to record its placement map."""
    race = BoxRace(own_load)
    clock.now += 2 * FIRST_BOX_S
    race.begin()
    return race


def own_load(byte_count: int) -> OwnLoad:
    """Return the own load, as a sample of it."""
    return OwnLoad("the engine's loader", byte_count / OWN_S, OWN_S)


def run(race: BoxRace, clock: Clock, session: Session, bytes_per_s: float, seconds: float) -> None:
    """Let a session receive bytes for a time, and compare ten times a second."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.1
        session.bytes_read += int(bytes_per_s / 10)
        race.compare(IMAGE_BYTES)


def test_sources_as_fast_as_the_own_load_are_read_to_the_end(clock: Clock) -> None:
    """Neither is the fork ended, nor a part cancelled."""
    race, session = started(clock), Session()
    with race.running(session):
        run(race, clock, session, IMAGE_BYTES / OWN_S, OWN_S)
    assert not session.is_cancelled


def test_slower_sources_end_the_fork(clock: Clock) -> None:
    """Within two seconds, with both times in the message."""
    race, session = started(clock), Session()
    with (
        race.running(session),
        pytest.raises(SlowSources, match=r"the sources need .* loader about 5.0 s"),
    ):
        run(race, clock, session, IMAGE_BYTES / OWN_S / 10, 2.0)


def test_sources_may_gather_before_the_first_byte(clock: Clock) -> None:
    """Their rate counts from the first byte on, or from the end of the time that a gather may take."""
    race, session = started(clock), Session()
    with race.running(session):
        run(race, clock, session, 0, FIRST_BOX_S - 0.5)
        with pytest.raises(SlowSources, match="deliver nothing"):
            run(race, clock, session, 0, 10.0)


def test_a_part_that_has_ended_counts(clock: Clock) -> None:
    """The rate does not fall when one of several parts is complete."""
    race, first, second = started(clock), Session(), Session()
    with race.running(second):
        with race.running(first):
            run(race, clock, first, IMAGE_BYTES / OWN_S, OWN_S / 2)
        run(race, clock, second, IMAGE_BYTES / OWN_S, OWN_S / 2)


def test_the_time_between_two_parts_does_not_count(clock: Clock) -> None:
    """The target builds its model, while nothing is received."""
    race, first, second = started(clock), Session(), Session()
    with race.running(first):
        run(race, clock, first, 0.8 * IMAGE_BYTES / OWN_S, 1.5)
    clock.now += 60.0
    race.begin()
    with race.running(second):
        run(race, clock, second, IMAGE_BYTES / OWN_S, OWN_S / 2)


def test_a_target_without_files_reads_slow_sources(clock: Clock) -> None:
    """There is nothing to compare them with."""

    def fail(byte_count: int) -> OwnLoad:
        raise StorageNotFound("no files")

    for race in (BoxRace(None), BoxRace(fail)):
        session = Session()
        with race.running(session):
            run(race, clock, session, 1, 30.0)


def test_parts_that_begin_after_the_end_are_cancelled() -> None:
    """A part may be about to begin on another thread when the fork ends."""
    race, running, late = BoxRace(None), Session(), Session()
    with race.running(running):
        race.cancel()
        with race.running(late):
            assert running.is_cancelled
            assert late.is_cancelled
