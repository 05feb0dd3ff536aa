"""When ranged reads ask again, when a second time, and how a wait is ended: without sockets."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.settings import StorageSettings
from rfork.storage.web.hedge import ENOUGH, SHARE, SOONEST_S, Hedges
from rfork.storage.web.pool import Ended, Leg, Pool
from rfork.storage.web.request import Origin
from rfork.storage.web.retry import LONGEST_ASKED_S, LONGEST_S, PROGRESS, Attempts, retry_after

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
MIB = 1 << 20

# When to ask again.


def test_waits_double_up_to_a_limit() -> None:
    """With the most jitter the waits double, from a tenth of a second to five seconds."""
    attempts = Attempts(9, lambda: 1.0)
    assert [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, None] == [attempts.failed(0) for _ in range(9)]


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True), st.floats(0, 1e9))
def test_no_wait_is_longer_than_its_limit(most: int, random: float, asked_s: float) -> None:
    """There are as many attempts as the settings say, and each wait is within its limits."""
    attempts = Attempts(most, lambda: random)
    waits = [attempts.failed(0, asked_s) for _ in range(most)]
    assert (None, most) == (waits[-1], attempts.made)
    for wait in waits[:-1]:
        assert wait is not None
        assert min(asked_s, LONGEST_ASKED_S) <= wait <= max(LONGEST_S, LONGEST_ASKED_S)


def test_progress_begins_the_count_anew() -> None:
    """An attempt that brought enough is the first of a new row; one that brought less is in vain."""
    attempts = Attempts(3, lambda: 1.0)
    brought = [0, PROGRESS - 1, PROGRESS, 0, PROGRESS, PROGRESS, 1, 1]
    assert [0.1, 0.2, 0.1, 0.2, 0.1, 0.1, 0.2, None] == [attempts.failed(count) for count in brought]


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
