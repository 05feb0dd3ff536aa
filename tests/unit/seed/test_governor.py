"""The governor: one byte budget for all that give, of the cap and of what the latency guard allows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rfork.seed.governor import LEAST_GRANT, Governor
from rfork.seed.latency import FIRST_RATE, LatencyGuard
from rfork.transport.bucket import SLICE_S
from tests.unit.clock import Clock


def serving(clock: Clock, floor: int = 1000) -> LatencyGuard:
    """A guard whose instance serves units of 10 ms and has given nothing yet."""
    guard = LatencyGuard(1.05, floor=lambda: floor, clock=clock)
    for _ in range(20):
        clock.now += 0.01
        guard.observe(0.01)
    return guard


@pytest.mark.parametrize(
    ("rate", "most", "expected"),
    [
        (None, 1 << 30, 1 << 30),
        (100_000_000, 1 << 30, 2_000_000),
        (100_000_000, 5, 5),
        (1000, 1 << 30, LEAST_GRANT),
    ],
)
def test_a_grant_under_a_rate_is_small(rate: int | None, most: int, expected: int) -> None:
    """A fiftieth of a second's worth at most, so that what serves beside it soon has the core again."""
    assert expected == Governor(rate, clock=Clock()).grant(most, "fork-1")


@pytest.mark.parametrize(
    ("cap", "expected"), [(None, FIRST_RATE), (FIRST_RATE * 2, FIRST_RATE), (5_000_000, 5_000_000)]
)
def test_the_lower_rate_holds(cap: int | None, expected: int) -> None:
    """The fixed cap, or what the latency of an instance that serves allows."""
    clock = Clock()
    governor = Governor(cap, serving(clock), clock=clock)
    assert (expected, int(expected * SLICE_S)) == (
        governor.rate(giving=True),
        governor.grant(1 << 40, "fork-1"),
    )


@pytest.mark.parametrize(
    ("reads", "cap", "expected"),
    [(False, None, None), (False, 7, 7), (True, None, FIRST_RATE), (True, 7, 7)],
)
def test_the_planner_hears_of_what_readers_are_held_to(
    reads: bool, cap: int | None, expected: int | None
) -> None:
    """While somebody reads that is the rate now; else only the cap is known."""
    clock = Clock()
    governor = Governor(cap, serving(clock), clock=clock)
    governor.rate(giving=reads)
    assert expected == governor.held


def test_a_grant_that_waits_hears_of_a_raised_rate() -> None:
    """It was told to wait for hours at the old rate, and goes as soon as the instance idles."""
    clock = Clock()
    guard = serving(clock, floor=1)
    governor = Governor(1, guard, clock=clock)
    governor.grant(1 << 20, "fork-1")
    waiter = threading.Thread(target=governor.grant, args=(1, "fork-1"))
    waiter.start()
    clock.now += 1 << 20
    waiter.join(30)
    assert not waiter.is_alive()


def test_every_reader_gets_its_turn() -> None:
    """Of several that ask again and again none is left behind: each has a turn before any has a second."""
    governor = Turns(lambda turn: None)
    left = dict.fromkeys("abcd", 1 << 20)

    def take(name: str) -> None:
        while left[name]:
            left[name] -= governor.grant(left[name], "fork-1")

    readers = [threading.Thread(target=take, args=(name,), name=name) for name in left]
    with governor._turn("fork-1"):  # until all have asked
        for reader in readers:
            reader.start()
        while governor.waiting() < len(readers):
            threading.Event().wait(0.001)
    for reader in readers:
        reader.join(30)
    first = governor.turns[1 : 1 + len(readers)]
    assert (0, list(left)) == (sum(left.values()), sorted(first))


class Turns(Governor):
    """A governor that notes who had its turn, and lets the test in before each has ended."""

    def __init__(self, during: Callable[[int], None]) -> None:
        super().__init__(8 << 20)
        self.served: list[str] = []
        self.turns: list[str] = []
        """The threads that had one."""
        self._during = during

    def take(self, fork_id: str) -> None:
        with self._turn(fork_id):
            self.served.append(fork_id)
            self._during(len(self.served))

    @contextmanager
    def _turn(self, fork_id: str) -> Iterator[None]:
        with super()._turn(fork_id):
            self.turns.append(threading.current_thread().name)
            yield

    def waiting(self) -> int:
        with self._lock:
            return sum(len(line) for line in self._lines.values())


def test_forks_have_turns_however_many_connections_they_have() -> None:
    """One that asks again while another fork has its turn is next, not behind that fork's whole line."""
    threads: list[threading.Thread] = []

    def ask(fork_id: str) -> None:
        before = governor.waiting()
        threads.append(threading.Thread(target=governor.take, args=(fork_id,)))
        threads[-1].start()
        while governor.waiting() == before:
            threading.Event().wait(0.001)

    def during(turn: int) -> None:
        if turn == 1:
            for fork_id in ("many", "many", "many", "many", "one", "another"):
                ask(fork_id)
        elif turn in (2, 5):
            ask("one")

    governor = Turns(during)
    governor.take("many")
    for thread in threads:
        thread.join(30)
    expected = ["many", "one", "another", "many", "one", "many", "one", "many", "many"]
    assert (expected, 0) == (governor.served, governor.waiting())


@pytest.mark.parametrize(("part", "expected"), [(1.0, 2_000_000), (0.25, 500_000)])
def test_what_others_take_by_themselves_is_not_granted(part: float, expected: int) -> None:
    """The rate holds for all together: beside readers that ask for nothing, less is granted."""
    assert expected == Governor(100_000_000, part=lambda: part, clock=Clock()).grant(1 << 40, "fork-1")


def test_closing_wakes_who_waits() -> None:
    """Those in line behind a deep debt are let go when the instance closes."""
    governor = Governor(1)
    governor.grant(1 << 20, "fork-1")
    forks = ("fork-1", "fork-1", "fork-2")
    waiters = [threading.Thread(target=governor.grant, args=(1, fork)) for fork in forks]
    for waiter in waiters:
        waiter.start()
    governor.close()
    for waiter in waiters:
        waiter.join(30)
    assert [False] * 3 == [waiter.is_alive() for waiter in waiters]
