"""Token bucket on a fake clock, with changing rates."""

from __future__ import annotations

import pytest

from rfork.net.token_bucket import BURST_S, TokenBucket
from tests.unit.fake_clock import FakeClock


def test_without_a_rate_nothing_waits() -> None:
    """Without a rate, consume never waits."""
    bucket = TokenBucket()
    assert [0.0] * 3 == [bucket.consume(1 << 40) for _ in range(3)]


def test_consuming_waits_until_the_debt_is_paid() -> None:
    """While there is debt, nothing is consumed and the wait is returned."""
    bucket = TokenBucket(1000, clock=FakeClock())
    assert [0.0, 0.5, 0.5] == [bucket.consume(nbytes) for nbytes in (500, 1000, 1)]


@pytest.mark.parametrize(("after_s", "expected"), [(0.0, 0.5), (0.2, 0.3), (0.5, 0.0), (60.0, 0.0)])
def test_debt_decreases_with_time(after_s: float, expected: float) -> None:
    """A debt of 500 bytes at 1000 bytes per second is paid after half a second."""
    clock = FakeClock()
    bucket = TokenBucket(1000, clock=clock)
    bucket.consume(500)
    clock.now += after_s
    assert pytest.approx(expected) == bucket.consume(1)


def test_idle_time_accumulates_at_most_one_burst() -> None:
    """After any idle time, only `BURST_S` of budget has accumulated."""
    clock = FakeClock()
    bucket = TokenBucket(1000, clock=clock)
    clock.now += 3600
    bucket.consume(1000)
    assert pytest.approx(1 - BURST_S) == bucket.consume(1)


def test_the_rate_is_not_exceeded_over_time() -> None:
    """The total stays below the rate plus one burst and one piece."""
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
    ids=["faster", "slower", "almost zero", "no rate"],
)
def test_a_new_rate_applies_immediately(rate: float | None, expected: float) -> None:
    """Debt is paid at the new rate, but never later than at the old one."""
    bucket = TokenBucket(1_000_000, clock=FakeClock())
    bucket.consume(500_000)
    bucket.set_rate(rate)
    assert pytest.approx(expected) == bucket.consume(1)
