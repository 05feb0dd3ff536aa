"""When ranged reads ask again, when a second time, and how a wait is ended: without sockets."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.settings import StorageSettings
from rfork.storage.web.dialling import Ended, Leg
from rfork.storage.web.hedge import ENOUGH, SHARE, SOONEST_S, Hedges
from rfork.storage.web.patience import SLOWEST, Patience
from rfork.storage.web.pool import IDLE_S, Connection, Pool
from rfork.storage.web.race import Race
from rfork.storage.web.request import Origin
from rfork.storage.web.retry import LONGEST_ASKED_S, LONGEST_S, PROGRESS, Attempts, Passing, retry_after
from rfork.transport.http.stream import Cursor, Stream
from tests.unit.clock import Clock

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
MIB = 1 << 20

# When to ask again.


def test_waits_double_up_to_a_limit() -> None:
    """With the most jitter the waits double, from a tenth of a second to five seconds."""
    attempts = Attempts(9, 0.0, lambda: 1.0, lambda: 0.0)
    assert [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, None] == [attempts.failed(0) for _ in range(9)]


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True), st.floats(0, 1e9))
def test_no_wait_is_longer_than_its_limit(least: int, random: float, asked_s: float) -> None:
    """Where no time is set there are just so many attempts, and each wait is within its limits."""
    attempts = Attempts(least, 0.0, lambda: random, lambda: 0.0)
    waits = [attempts.failed(0, asked_s) for _ in range(least)]
    assert (None, least) == (waits[-1], attempts.made)
    for wait in waits[:-1]:
        assert wait is not None
        assert min(asked_s, LONGEST_ASKED_S) <= wait <= max(LONGEST_S, LONGEST_ASKED_S)


def seconds_until_given_up(attempts: Attempts, clock: Clock, attempt_s: float) -> float:
    """How long attempts are made that fail, each after so many seconds."""
    began = clock()
    clock.now += attempt_s
    while (wait_s := attempts.failed(0)) is not None:
        clock.now += wait_s + attempt_s
    return clock() - began


@pytest.mark.parametrize("random", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("least", "least_s", "attempt_s", "most_s"),
    [
        (5, 10.0, 0.0, 10.0),  # refused at once: what is gone for ten seconds is waited for
        (1, 10.0, 0.0, 10.0),
        (5, 10.0, 3.0, 5 * 3.0 + 1.5),  # the attempts take longer than that by themselves
        (2, 600.0, 0.0, 600.0),
    ],
)
def test_nothing_is_given_up_too_soon_or_too_late(
    least: int, least_s: float, attempt_s: float, most_s: float, random: float
) -> None:
    """The attempts are spent and the time has passed, and not much more of it."""
    clock = Clock()
    attempts = Attempts(least, least_s, lambda: random, clock)
    took_s = seconds_until_given_up(attempts, clock, attempt_s)
    assert (True, True) == (least <= attempts.made, least_s <= took_s <= most_s + attempt_s + 1e-6)


def test_a_server_that_is_away_is_not_asked_too_often() -> None:
    """Ten seconds of a server that refuses cost a dozen requests or so."""
    clock = Clock()
    attempts = Attempts(5, 10.0, lambda: 0.0, clock)
    seconds_until_given_up(attempts, clock, 0.0)
    assert 12 >= attempts.made


def test_progress_begins_the_count_anew() -> None:
    """An attempt that brought enough is the first of a new row; one that brought less is in vain."""
    attempts = Attempts(3, 0.0, lambda: 1.0, lambda: 0.0)
    brought = [0, PROGRESS - 1, PROGRESS, 0, PROGRESS, PROGRESS, 1, 1]
    assert [0.1, 0.2, 0.1, 0.2, 0.1, 0.1, 0.2, None] == [attempts.failed(count) for count in brought]


def test_progress_begins_the_time_anew() -> None:
    """The time that must pass is counted from the last attempt that brought enough."""
    clock = Clock()
    attempts = Attempts(1, 10.0, lambda: 0.0, clock)
    waits = []
    for brought in (0, PROGRESS, 0, 0):
        clock.now += 6.0
        waits.append(attempts.failed(brought) is not None)
    assert [True, True, True, False] == waits


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0.0),
        (" 17 ", 17.0),
        ("Mon, 04 May 2026 12:00:30 GMT", 30.0),
        ("Mon, 04 May 2026 11:00:00 GMT", 0.0),
        ("Mon, 04 May 2026 12:00:30 -0000", 30.0),
        ("", 0.0),
        ("-1", 0.0),
        ("1.5", 0.0),
        ("9" * 5000, 0.0),
        ("Mon, 04 May 99999999999999999999 12:00:30 GMT", 0.0),
        ("Mon, 04 May 2026 12:00:30 +99999999999999999", 0.0),
        ("soon", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, expected: float) -> None:
    """Both forms are understood; what is neither asks for nothing."""
    assert expected == retry_after(value, NOW)


@given(st.text(max_size=60))
def test_no_retry_after_breaks_a_read(value: str) -> None:
    """Whatever a server writes there, it is a time that is not negative."""
    assert 0.0 <= retry_after(value, NOW)


# When to ask a second time.


def used(hedges: Hedges, count: int, seconds: float = 0.2) -> Hedges:
    """After so many answers of a mebibyte, each a tenth of a second to its first byte."""
    for _ in range(count):
        hedges.answered(MIB, 0.1, seconds)
    return hedges


def test_nothing_is_slow_before_enough_is_known() -> None:
    """The first requests are never sent twice, nor is any with the setting 0."""
    assert None is used(Hedges(4, MIB), ENOUGH - 1).due_s(MIB)
    assert None is used(Hedges(0, MIB), 10 * ENOUGH).due_s(MIB)


def test_what_is_slow_depends_on_the_size() -> None:
    """A request is slow after so many times the usual first byte and the usual time of its bytes."""
    hedges = used(Hedges(4, MIB), ENOUGH)
    assert [SOONEST_S, 0.8, 4 * 0.1 + 4 * 0.4] == [hedges.due_s(size) for size in (1, MIB, 4 * MIB)]


def test_most_say_what_is_usual() -> None:
    """A few slow answers change nothing; once most are slow, slow is usual."""
    hedges = used(Hedges(4, MIB), 60)
    assert 0.8 == used(hedges, 20, 100.1).due_s(MIB)
    assert 4 * 100.1 == used(hedges, 40, 100.1).due_s(MIB)


def test_small_answers_say_little_of_large_ones() -> None:
    """Seconds per byte are those of most bytes, not of most requests."""
    hedges = used(Hedges(4, MIB), 1)
    for _ in range(60):
        hedges.answered(100, 0.1, 0.11)
    assert 0.8 == hedges.due_s(MIB)


@pytest.mark.parametrize("answered", [ENOUGH, 100, 1000])
def test_only_a_few_are_sent_twice(answered: int) -> None:
    """However many are slow at once, second requests stay a small share of all."""
    hedges = used(Hedges(4, 1 << 40), answered)
    begun = sum(hedges.begin(1) for _ in range(answered))
    assert (max(1, round(SHARE * answered)), begun) == (begun, hedges.begun)


def test_second_requests_share_their_memory() -> None:
    """There is none where its bytes find no room, and again once another has ended."""
    hedges = used(Hedges(4, 4 * MIB), 1000)
    assert [True, False, True] == [hedges.begin(3 * MIB), hedges.begin(2 * MIB), hedges.begin(MIB)]
    hedges.end(3 * MIB)
    assert [True, False] == [hedges.begin(3 * MIB), hedges.begin(1)]


def test_a_second_request_that_cannot_begin_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no further thread, the first goes on and the memory is another's."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("rfork.storage.web.race.threading.Thread.start", start)
    hedges = used(Hedges(4, MIB), 1000)
    cursor = Cursor([memoryview(bytearray(100))])
    race = Race(hedges, cursor, 0, 100, Leg(), Leg(), lambda cursor, begin, end: None)
    assert (SOONEST_S, 0) == (race.late(), hedges.held_bytes)
    race.settle()
    assert 0 == cursor.done


# Waits.


class Cut:
    """What notes that it was cut."""

    def __init__(self) -> None:
        self.count = 0

    def cut(self) -> None:
        self.count += 1


def test_a_leg_cuts_what_it_holds_and_nothing_else() -> None:
    """What was let go may serve another by now: ending the leg leaves it alone."""
    before, held, after = Cut(), Cut(), Cut()
    leg = Leg()
    with leg.holding(before):
        pass
    with leg.holding(held):
        leg.end()
    with pytest.raises(Ended), leg.holding(after):
        pass
    assert (0, 1, 0) == (before.count, held.count, after.count)


def test_a_leg_that_was_ended_takes_no_connection() -> None:
    """It does not even wait for its turn."""
    leg = Leg()
    leg.end()
    with pytest.raises(Ended):
        Pool(StorageSettings()).take(Origin(False, "127.0.0.1", 1), leg, fresh=False, extra=False)


class Still:
    """A stream of which only its end is looked at."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def kept(pool: Pool, origin: Origin, process: int | None = None) -> Still:
    """A connection that has answered, and is given back to the pool."""
    still = Still()
    connection = Connection(
        cast(Stream, still), origin, extra=True, process=os.getpid() if process is None else process
    )
    pool.give_back(connection, usable=True)
    return still


def taken(pool: Pool, origin: Origin) -> object:
    """What the pool gives for a request; None where it has nothing and would connect."""
    leg = Leg()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rfork.storage.web.pool.dial", lambda *_: None)
        return pool.take(origin, leg, fresh=False, extra=True).stream


HERE, THERE = Origin(False, "here", 80), Origin(False, "there", 80)


@pytest.mark.parametrize(("idle_s", "reused"), [(IDLE_S - 1, True), (IDLE_S, False)])
def test_connections_that_were_idle_for_long_are_not_used(idle_s: float, reused: bool) -> None:
    """What lies between may have forgotten them; they are closed, not asked."""
    clock = Clock()
    pool = Pool(StorageSettings(), clock)
    old = kept(pool, HERE)
    clock.now += idle_s
    assert (reused, not reused) == (taken(pool, HERE) is old, old.closed)


def test_idle_connections_of_one_origin_are_dropped() -> None:
    """Those to other servers stay."""
    pool = Pool(StorageSettings())
    here, there = kept(pool, HERE), kept(pool, THERE)
    pool.drop_idle(HERE)
    assert (None, True, True) == (taken(pool, HERE), here.closed, taken(pool, THERE) is there)


def test_connections_of_another_process_are_not_kept() -> None:
    """What was taken before a fork and comes back after it is closed, and frees no place."""
    pool = Pool(StorageSettings())
    other = kept(pool, HERE, process=os.getpid() + 1)
    assert (None, True) == (taken(pool, HERE), other.closed)


@pytest.mark.parametrize(("memory", "most"), [(16 * MIB, 16 * MIB), (1 << 30, 256 * MIB)])
def test_a_block_may_be_sent_twice_however_little_memory_there_is(memory: int, most: int) -> None:
    """Second requests may hold a quarter of the memory, and a block of the largest size in any case."""
    hedges = used(Pool(StorageSettings(memory=memory)).hedges, 1000)
    assert [True, False] == [hedges.begin(most), hedges.begin(1)]


# Patience.


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        ([], "sent nothing for 10 s"),
        ([1, SLOWEST - 2], f"sent no more than {SLOWEST - 1} bytes in 10 s"),
        ([1, SLOWEST - 1], None),
        ([SLOWEST, 0], None),
    ],
)
def test_a_body_must_come_at_some_speed(
    came: list[int], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each timeout there must be so many bytes; then the next begins."""
    clock = Clock()
    monkeypatch.setattr("rfork.storage.web.patience.time.monotonic", clock)
    patience = Patience(10.0)
    clock.now += 9.0
    for count in came:
        patience.came_of_body(count)
    clock.now += 1.0
    said = None
    try:
        patience.left()
    except Passing as error:
        said = str(error)
    assert expected == said


def test_a_head_must_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bytes of it come, the time for all of it does not begin anew."""
    clock = Clock()
    monkeypatch.setattr("rfork.storage.web.patience.time.monotonic", clock)
    patience = Patience(10.0)
    clock.now += 9.0
    patience.came(2 * SLOWEST)
    clock.now += 1.0
    with pytest.raises(Passing, match=f"sent no more than {2 * SLOWEST} bytes in 10 s"):
        patience.left()
