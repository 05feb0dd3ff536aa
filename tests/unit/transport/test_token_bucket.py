"""A byte budget on a clock of the test's own, whose rate changes as the test likes."""

from __future__ import annotations

import pytest

from rfork.transport.token_bucket import BURST_S, TokenBucket
from tests.unit.fake_clock import FakeClock


def test_without_a_rate_everything_passes() -> None:
    """No rate, no wait."""
    bucket = TokenBucket()
    assert [0.0] * 3 == [bucket.consume(1 << 40) for _ in range(3)]


def test_the_next_waits_until_the_last_is_paid() -> None:
    """Who finds something owed spends nothing and is told how long to wait."""
    bucket = TokenBucket(1000, clock=FakeClock())
    assert [0.0, 0.5, 0.5] == [bucket.consume(nbytes) for nbytes in (500, 1000, 1)]


@pytest.mark.parametrize(("after_s", "expected"), [(0.0, 0.5), (0.2, 0.3), (0.5, 0.0), (60.0, 0.0)])
def test_what_is_owed_goes_away_with_time(after_s: float, expected: float) -> None:
    """The debt of 500 bytes at 1000 bytes a second is gone after half a second."""
    clock = FakeClock()
    bucket = TokenBucket(1000, clock=clock)
    bucket.consume(500)
    clock.now += after_s
    assert pytest.approx(expected) == bucket.consume(1)


def test_an_idle_hour_saves_no_more_than_a_burst() -> None:
    """After any idle time only `BURST_S` of budget has been saved."""
    clock = FakeClock()
    bucket = TokenBucket(1000, clock=clock)
    clock.now += 3600
    bucket.consume(1000)
    assert pytest.approx(1 - BURST_S) == bucket.consume(1)


def test_the_rate_holds_over_time() -> None:
    """Who keeps to the waits it is told never exceeds the rate, its burst and its last piece."""
    clock = FakeClock()
    bucket = TokenBucket(1000, clock=clock)
    consumed = 0
    for nbytes in (700, 30, 900, 1, 1, 250) * 50:
        while (delay := bucket.consume(nbytes)) > 0:
            clock.now += delay
        consumed += nbytes
    assert consumed - 900 <= 1000 * (clock.now - 100.0 + BURST_S)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (2_000_000.0, 0.25),
        (500_000.0, 0.5),
        (1.0, 0.0),
        (None, 0.0),
    ],
    ids=["faster", "slower", "as good as stopped", "no rate"],
)
def test_a_new_rate_holds_at_once(rate: float | None, expected: float) -> None:
    """What is owed is paid at the new rate, but never later than it would have been."""
    bucket = TokenBucket(1_000_000, clock=FakeClock())
    bucket.consume(500_000)
    bucket.set_rate(rate)
    assert pytest.approx(expected) == bucket.consume(1)
