"""The read rate advised to one-sided readers, and when they are notified of a change."""

from __future__ import annotations

import threading

import pytest

from rfork.source.egress_limiter import INCREASE_INTERVAL_S, EgressLimiter, ReaderRateAdvisor
from rfork.source.latency_controller import LatencyController
from rfork.source.rate_search import FIRST_RATE
from tests.unit.fake_clock import FakeClock


class VariableRateLimiter(EgressLimiter):
    """A limiter whose rate the test sets."""

    def __init__(self, rate: int | None) -> None:
        super().__init__(None)
        self.current_rate = rate

    def rate(self, *, active: bool) -> int | None:
        return self.current_rate


@pytest.mark.parametrize(
    ("cap", "readers", "expected"),
    [(None, 3, None), (9000, 3, 3000), (9000, 1, 9000), (9000, 0, 9000), (2, 3, 1)],
)
def test_readers_share_the_rate(cap: int | None, readers: int, expected: int | None) -> None:
    """Each reader is advised the same share, and at least one byte per second."""
    advisor = ReaderRateAdvisor(EgressLimiter(cap), lambda: readers, lambda: None)
    reader_rate = advisor.per_reader_rate()
    advisor.close()
    assert expected == reader_rate


@pytest.mark.parametrize(
    ("before", "now", "after_s", "expected"),
    [
        (1000, 1000, 9.0, False),
        (1000, 950, 9.0, False),
        (1000, 500, 0.0, True),
        (1000, 1200, 9.0, False),
        (1000, 2000, INCREASE_INTERVAL_S / 2, False),
        (1000, 2000, 2 * INCREASE_INTERVAL_S, True),
        (1000, None, 0.0, True),
        (None, 1000, 0.0, True),
        (None, None, 9.0, False),
    ],
)
def test_readers_are_notified_of_significant_changes(
    before: int | None, now: int | None, after_s: float, expected: bool
) -> None:
    """A lower rate is sent immediately, a much higher one after an interval, and a small change never."""
    clock, limiter = FakeClock(), VariableRateLimiter(before)
    advisor = ReaderRateAdvisor(limiter, lambda: 1, lambda: None, clock=clock)
    advisor.refresh()
    clock.now += after_s
    limiter.current_rate = now
    assert expected is advisor.refresh()


def test_a_one_sided_reader_counts_as_egress() -> None:
    """The source runs no code for one-sided reads, so an open reader alone counts as egress."""
    clock = FakeClock()
    controller = LatencyController(1.05, clock=clock)
    for _ in range(20):
        clock.now += 0.01
        controller.record_step(0.01)
    advisor = ReaderRateAdvisor(EgressLimiter(None, controller, clock=clock), lambda: 1, lambda: None, clock=clock)
    advisor.refresh()
    assert FIRST_RATE == controller.current_limit()


def test_changes_are_notified_automatically() -> None:
    """After the first request a reader is notified of each significant change."""
    limiter, notified = VariableRateLimiter(1000), threading.Event()
    advisor = ReaderRateAdvisor(limiter, lambda: 1, notified.set)
    first_rate = advisor.per_reader_rate()
    limiter.current_rate = 10
    was_notified = notified.wait(30)
    reader_rate = advisor.per_reader_rate()
    advisor.close()
    assert 1000 == first_rate
    assert was_notified
    assert 10 == reader_rate


def test_a_rate_read_by_one_reader_is_notified_to_all() -> None:
    """If one reader's request refreshes the rate, the other readers are still notified."""
    readers, notified = [1], threading.Event()
    advisor = ReaderRateAdvisor(VariableRateLimiter(1000), lambda: readers[0], notified.set)
    reader_rates = [advisor.per_reader_rate()]
    assert notified.wait(30)
    advisor.close()
    notified.clear()
    readers[0] = 2
    reader_rates.append(advisor.per_reader_rate())
    second_advisor = ReaderRateAdvisor(VariableRateLimiter(1000), lambda: readers[0], notified.set)
    reader_rates.append(second_advisor.per_reader_rate())
    was_notified = notified.wait(30)
    second_advisor.close()
    assert [1000, 500, 500] == reader_rates
    assert was_notified


def test_closing_ends_the_advisor_thread() -> None:
    """The thread ends whether it has readers, waits for the first, or never started."""
    waiting, fresh = (ReaderRateAdvisor(VariableRateLimiter(5), lambda: 0, lambda: None) for _ in range(2))
    busy = ReaderRateAdvisor(VariableRateLimiter(5), lambda: 1, lambda: None)
    waiting.per_reader_rate()
    busy.per_reader_rate()
    for advisor in (waiting, busy, fresh):
        advisor.close()
    assert [] == [thread.name for thread in threading.enumerate() if thread.name == "rfork-rate-advisor"]
