"""The governor: one byte budget for all that give, of the cap and of what the latency guard allows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rfork.source.egress_limiter import MIN_GRANT, EgressLimiter
from rfork.source.latency_controller import FIRST_RATE, LatencyController
from rfork.transport.token_bucket import SLICE_S
from tests.unit.fake_clock import FakeClock


def serving(clock: FakeClock, floor: int = 1000) -> LatencyController:
    """A guard whose instance serves units of 10 ms and has given nothing yet."""
    controller = LatencyController(1.05, floor=lambda: floor, clock=clock)
    for _ in range(20):
        clock.now += 0.01
        controller.record_step(0.01)
    return controller


@pytest.mark.parametrize(
    ("rate", "max_bytes", "expected"),
    [
        (None, 1 << 30, 1 << 30),
        (100_000_000, 1 << 30, 2_000_000),
        (100_000_000, 5, 5),
        (1000, 1 << 30, MIN_GRANT),
    ],
)
def test_a_grant_under_a_rate_is_small(rate: int | None, max_bytes: int, expected: int) -> None:
    """A fiftieth of a second's worth at most, so that what serves beside it soon has the core again."""
    assert expected == EgressLimiter(rate, clock=FakeClock()).grant(max_bytes, "fork-1")


@pytest.mark.parametrize(
    ("cap", "expected"), [(None, FIRST_RATE), (FIRST_RATE * 2, FIRST_RATE), (5_000_000, 5_000_000)]
)
def test_the_lower_rate_holds(cap: int | None, expected: int) -> None:
    """The fixed cap, or what the latency of an instance that serves allows."""
    clock = FakeClock()
    limiter = EgressLimiter(cap, serving(clock), clock=clock)
    assert (expected, int(expected * SLICE_S)) == (
        limiter.rate(active=True),
        limiter.grant(1 << 40, "fork-1"),
    )


@pytest.mark.parametrize(
    ("reads", "cap", "expected"),
    [(False, None, None), (False, 7, 7), (True, None, FIRST_RATE), (True, 7, 7)],
)
def test_the_planner_hears_of_what_readers_are_held_to(reads: bool, cap: int | None, expected: int | None) -> None:
    """While somebody reads that is the rate now; else only the cap is known."""
    clock = FakeClock()
    limiter = EgressLimiter(cap, serving(clock), clock=clock)
    limiter.rate(active=reads)
    assert expected == limiter.current_limit


def test_a_grant_that_waits_hears_of_a_raised_rate() -> None:
    """It was told to wait for hours at the old rate, and goes as soon as the instance idles."""
    clock = FakeClock()
    controller = serving(clock, floor=1)
    limiter = EgressLimiter(1, controller, clock=clock)
    limiter.grant(1 << 20, "fork-1")
    waiter = threading.Thread(target=limiter.grant, args=(1, "fork-1"))
    waiter.start()
    clock.now += 1 << 20
    waiter.join(30)
    assert not waiter.is_alive()


def test_every_reader_gets_its_turn() -> None:
    """Of several that ask again and again none is left behind: each has a turn before any has a second."""
    limiter = RecordingLimiter(lambda turn: None)
    left = dict.fromkeys("abcd", 1 << 20)

    def read_all(name: str) -> None:
        while left[name]:
            left[name] -= limiter.grant(left[name], "fork-1")

    readers = [threading.Thread(target=read_all, args=(name,), name=name) for name in left]
    with limiter._next_waiter("fork-1"):  # until all have asked
        for reader in readers:
            reader.start()
        while limiter.waiting() < len(readers):
            threading.Event().wait(0.001)
    for reader in readers:
        reader.join(30)
    first = limiter.turns[1 : 1 + len(readers)]
    assert (0, list(left)) == (sum(left.values()), sorted(first))


class RecordingLimiter(EgressLimiter):
    """A governor that notes who had its turn, and lets the test in before each has ended."""

    def __init__(self, on_turn: Callable[[int], None]) -> None:
        super().__init__(8 << 20)
        self.served: list[str] = []
        self.turns: list[str] = []
        """The threads that had one."""
        self._on_turn = on_turn

    def take_turn(self, fork_id: str) -> None:
        with self._next_waiter(fork_id):
            self.served.append(fork_id)
            self._on_turn(len(self.served))

    @contextmanager
    def _next_waiter(self, fork_id: str) -> Iterator[None]:
        with super()._next_waiter(fork_id):
            self.turns.append(threading.current_thread().name)
            yield

    def waiting(self) -> int:
        with self._lock:
            return sum(len(line) for line in self._waiters.values())


def test_forks_have_turns_however_many_connections_they_have() -> None:
    """One that asks again while another fork has its turn is next, not behind that fork's whole line."""
    threads: list[threading.Thread] = []

    def start_reader(fork_id: str) -> None:
        before = limiter.waiting()
        threads.append(threading.Thread(target=limiter.take_turn, args=(fork_id,)))
        threads[-1].start()
        while limiter.waiting() == before:
            threading.Event().wait(0.001)

    def on_turn(turn: int) -> None:
        if turn == 1:
            for fork_id in ("many", "many", "many", "many", "one", "another"):
                start_reader(fork_id)
        elif turn in (2, 5):
            start_reader("one")

    limiter = RecordingLimiter(on_turn)
    limiter.take_turn("many")
    for thread in threads:
        thread.join(30)
    expected = ["many", "one", "another", "many", "one", "many", "one", "many", "many"]
    assert (expected, 0) == (limiter.served, limiter.waiting())


@pytest.mark.parametrize(("part", "expected"), [(1.0, 2_000_000), (0.25, 500_000)])
def test_what_others_take_by_themselves_is_not_granted(part: float, expected: int) -> None:
    """The rate holds for all together: beside readers that ask for nothing, less is granted."""
    assert expected == EgressLimiter(100_000_000, part=lambda: part, clock=FakeClock()).grant(1 << 40, "fork-1")


def test_closing_wakes_who_waits() -> None:
    """Those in line behind a deep debt are let go when the instance closes."""
    limiter = EgressLimiter(1)
    limiter.grant(1 << 20, "fork-1")
    forks = ("fork-1", "fork-1", "fork-2")
    waiters = [threading.Thread(target=limiter.grant, args=(1, fork)) for fork in forks]
    for waiter in waiters:
        waiter.start()
    limiter.close()
    for waiter in waiters:
        waiter.join(30)
    assert [False] * 3 == [waiter.is_alive() for waiter in waiters]
