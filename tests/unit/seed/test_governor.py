"""The governor: a byte budget on a clock of the test's own."""

from __future__ import annotations

import threading

import pytest

from rfork.seed.governor import BURST_S, LEAST_GRANT, Governor


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_rate_everything_passes() -> None:
    """No cap, no wait."""
    governor = Governor(None)
    assert [0.0] * 3 == [governor.reserve(1 << 40) for _ in range(3)]


def test_the_rate_holds_back_to_back() -> None:
    """Each spender waits until the bytes before its own have been paid for."""
    governor = Governor(1000, clock=Clock())
    assert [0.0, 0.5, 1.5, 1.6] == pytest.approx([governor.reserve(nbytes) for nbytes in (500, 1000, 100, 1)])


@pytest.mark.parametrize(
    ("idle_s", "expected"),
    [(0.0, 0.5), (0.2, 0.3), (0.5, 0.0), (60.0, 0.0)],
)
def test_waiting_pays_the_debt(idle_s: float, expected: float) -> None:
    """The debt of 500 bytes at 1000 bytes a second is gone after half a second."""
    clock = Clock()
    governor = Governor(1000, clock=clock)
    governor.reserve(500)
    clock.now += idle_s
    assert pytest.approx(expected) == governor.reserve(1)


def test_an_idle_hour_saves_no_more_than_a_burst() -> None:
    """After any idle time only `BURST_S` of budget can be spent at once."""
    clock = Clock()
    governor = Governor(1000, clock=clock)
    clock.now += 3600
    governor.reserve(1000)
    assert pytest.approx(1 - BURST_S) == governor.reserve(1)


def test_the_rate_holds_over_time() -> None:
    """A spender that keeps to the waits it is told never exceeds the rate and its burst."""
    clock = Clock()
    governor = Governor(1000, clock=clock)
    spent = 0
    for nbytes in (700, 30, 900, 1, 1, 250) * 50:
        clock.now += governor.reserve(nbytes)
        spent += nbytes
    assert spent - 900 <= 1000 * (clock.now - 100.0 + BURST_S)


@pytest.mark.parametrize(
    ("rate", "most", "expected"),
    [
        (None, 1 << 30, 1 << 30),
        (10_000_000, 1 << 30, 1_000_000),
        (10_000_000, 5, 5),
        (1000, 1 << 30, LEAST_GRANT),
    ],
)
def test_a_grant_under_a_rate_is_small(rate: int | None, most: int, expected: int) -> None:
    """A tenth of a second's worth at most, so that many readers of a slow seed all hear from it."""
    assert expected == Governor(rate, clock=Clock()).grant(most)


def test_closing_wakes_who_waits() -> None:
    """A spender in deep debt is let go when the instance closes."""
    governor = Governor(1)
    governor.reserve(1 << 30)
    waiter = threading.Thread(target=governor.grant, args=(1,))
    waiter.start()
    governor.close()
    waiter.join(30)
    assert not waiter.is_alive()
