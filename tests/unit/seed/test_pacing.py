"""What readers on one-sided transports are asked to keep to, and when they hear of it."""

from __future__ import annotations

import threading

import pytest

from rfork.seed.governor import Governor
from rfork.seed.latency import FIRST_RATE, LatencyGuard
from rfork.seed.pacing import RAISE_GAP_S, Pacing
from tests.unit.clock import Clock


class Changing(Governor):
    """A governor whose rate the test sets."""

    def __init__(self, rate: int | None) -> None:
        super().__init__(None)
        self.now = rate

    def rate(self, *, giving: bool) -> int | None:
        return self.now


@pytest.mark.parametrize(
    ("cap", "readers", "expected"),
    [(None, 3, None), (9000, 3, 3000), (9000, 1, 9000), (9000, 0, 9000), (2, 3, 1)],
)
def test_readers_share_the_rate(cap: int | None, readers: int, expected: int | None) -> None:
    """Each gets the same part, and never nothing at all."""
    pacing = Pacing(Governor(cap), lambda: readers, lambda: None)
    share = pacing.share()
    pacing.close()
    assert expected == share


@pytest.mark.parametrize(
    ("before", "now", "after_s", "expected"),
    [
        (1000, 1000, 9.0, False),
        (1000, 950, 9.0, False),
        (1000, 500, 0.0, True),
        (1000, 1200, 9.0, False),
        (1000, 2000, RAISE_GAP_S / 2, False),
        (1000, 2000, RAISE_GAP_S, True),
        (1000, None, 0.0, True),
        (None, 1000, 0.0, True),
        (None, None, 9.0, False),
    ],
)
def test_readers_hear_of_what_matters(
    before: int | None, now: int | None, after_s: float, expected: bool
) -> None:
    """A lower rate at once, a much higher one when the last news is old enough, a little change never."""
    clock, governor = Clock(), Changing(before)
    pacing = Pacing(governor, lambda: 1, lambda: None, clock=clock)
    pacing.look()
    clock.now += after_s
    governor.now = now
    assert expected is pacing.look()


def test_a_reader_makes_the_instance_one_that_gives() -> None:
    """No code of the source runs for its reads, so that there is one is all that is known of them."""
    clock = Clock()
    guard = LatencyGuard(1.05, clock=clock)
    for _ in range(20):
        clock.now += 0.01
        guard.observe(0.01)
    pacing = Pacing(Governor(None, guard, clock=clock), lambda: 1, lambda: None, clock=clock)
    pacing.look()
    assert FIRST_RATE == guard.held()


def test_it_tells_by_itself() -> None:
    """Who asked once hears of each change that matters, without asking again."""
    governor, told = Changing(1000), threading.Event()
    pacing = Pacing(governor, lambda: 1, told.set)
    asked = pacing.share()
    governor.now = 10
    heard = told.wait(30)
    share = pacing.share()
    pacing.close()
    assert (1000, True, 10) == (asked, heard, share)


def test_what_one_reader_hears_all_hear() -> None:
    """The one that asks takes the news for itself: the others are told to ask too."""
    readers, told = [1], threading.Event()
    pacing = Pacing(Changing(1000), lambda: readers[0], told.set)
    shares = [pacing.share()]
    assert told.wait(30)
    pacing.close()
    told.clear()
    readers[0] = 2
    shares.append(pacing.share())
    again = Pacing(Changing(1000), lambda: readers[0], told.set)
    shares.append(again.share())
    heard = told.wait(30)
    again.close()
    assert ([1000, 500, 500], True) == (shares, heard)


def test_closing_ends_its_thread() -> None:
    """Whether it looks after readers, waits for the first, or never began."""
    waiting, fresh = (Pacing(Changing(5), lambda: 0, lambda: None) for _ in range(2))
    busy = Pacing(Changing(5), lambda: 1, lambda: None)
    waiting.share()
    busy.share()
    for pacing in (waiting, busy, fresh):
        pacing.close()
    assert [] == [thread.name for thread in threading.enumerate() if thread.name == "rfork-pacing"]
