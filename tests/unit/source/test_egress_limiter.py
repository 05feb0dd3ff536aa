"""The egress limiter: one byte budget for all readers, bounded by the fixed cap and by the latency
controller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rfork.source.egress_limiter import GRANT_S, MAX_GRANT, MIN_GRANT, EgressLimiter
from rfork.source.latency_controller import LatencyController
from rfork.source.rate_search import FIRST_RATE
from tests.unit.fake_clock import FakeClock


def serving_controller(clock: FakeClock, floor: int = 1000) -> LatencyController:
    """Return a controller of an instance that serves steps of 10 ms and has sent nothing yet."""
    controller = LatencyController(1.05, floor=lambda: floor, clock=clock)
    for _ in range(20):
        clock.now += 0.01
        controller.record_step(0.01)
    return controller


@pytest.mark.parametrize(
    ("rate", "max_bytes", "expected"),
    [
        (None, 1 << 30, 1 << 30),
        (10_000_000, 1 << 30, 1_000_000),
        (100_000_000, 1 << 30, MAX_GRANT),
        (100_000_000, 5, 5),
        (1000, 1 << 30, MIN_GRANT),
    ],
)
def test_a_grant_under_a_rate_is_small(rate: int | None, max_bytes: int, expected: int) -> None:
    """A grant covers at most a tenth of a second and 2 MiB, so that concurrent work soon gets the core back."""
    assert expected == EgressLimiter(rate, clock=FakeClock()).grant(max_bytes, "fork-1")


@pytest.mark.parametrize(
    ("cap", "expected"), [(None, FIRST_RATE), (FIRST_RATE * 2, FIRST_RATE), (5_000_000, 5_000_000)]
)
def test_the_lower_rate_applies(cap: int | None, expected: int) -> None:
    """The rate is the lower of the fixed cap and the controller's rate while the instance serves."""
    clock = FakeClock()
    limiter = EgressLimiter(cap, serving_controller(clock), clock=clock)
    assert expected == limiter.rate(active=True)
    assert min(MAX_GRANT, int(expected * GRANT_S)) == limiter.grant(1 << 40, "fork-1")


@pytest.mark.parametrize(
    ("reads", "cap", "expected"),
    [(False, None, None), (False, 7, 7), (True, None, FIRST_RATE), (True, 7, 7)],
)
def test_the_current_limit_is_reported(reads: bool, cap: int | None, expected: int | None) -> None:
    """While a reader is active, the limit is the current rate; otherwise only the cap is known."""
    clock = FakeClock()
    limiter = EgressLimiter(cap, serving_controller(clock), clock=clock)
    limiter.rate(active=reads)
    assert expected == limiter.current_limit


def test_a_waiting_grant_uses_a_raised_rate() -> None:
    """A grant that would wait for hours at the old rate is served as soon as the instance is idle."""
    clock = FakeClock()
    controller = serving_controller(clock, floor=1)
    limiter = EgressLimiter(1, controller, clock=clock)
    limiter.grant(1 << 20, "fork-1")
    waiter = threading.Thread(target=limiter.grant, args=(1, "fork-1"))
    waiter.start()
    clock.now += 1 << 20
    waiter.join(30)
    assert not waiter.is_alive()


def test_every_reader_is_served_in_turn() -> None:
    """Each of several readers that request grants repeatedly has one turn before any has a second."""
    limiter = RecordingLimiter(lambda turn: None)
    remaining = dict.fromkeys("abcd", 1 << 20)

    def read_all(name: str) -> None:
        while remaining[name]:
            remaining[name] -= limiter.grant(remaining[name], "fork-1")

    readers = [threading.Thread(target=read_all, args=(name,), name=name) for name in remaining]
    with limiter._next_waiter("fork-1"):  # until all have requested a grant
        for reader in readers:
            reader.start()
        while limiter.waiter_count() < len(readers):
            threading.Event().wait(0.001)
    for reader in readers:
        reader.join(30)
    first = limiter.turns[1 : 1 + len(readers)]
    assert 0 == sum(remaining.values())
    assert list(remaining) == sorted(first)


class RecordingLimiter(EgressLimiter):
    """Records each turn, and calls the test before the turn ends."""

    def __init__(self, on_turn: Callable[[int], None]) -> None:
        super().__init__(8 << 20)
        self.served: list[str] = []
        self.turns: list[str] = []
        """Names of the threads that had a turn."""
        self._on_turn = on_turn

    def run_turn(self, fork_id: str) -> None:
        with self._next_waiter(fork_id):
            self.served.append(fork_id)
            self._on_turn(len(self.served))

    @contextmanager
    def _next_waiter(self, fork_id: str) -> Iterator[None]:
        with super()._next_waiter(fork_id):
            self.turns.append(threading.current_thread().name)
            yield

    def waiter_count(self) -> int:
        with self._lock:
            return sum(len(waiters) for waiters in self._waiters.values())


def test_forks_are_served_in_turn_however_many_connections_they_have() -> None:
    """A fork that requests a grant during another fork's turn is next, ahead of that fork's remaining
    requests.
    """
    threads: list[threading.Thread] = []

    def start_reader(fork_id: str) -> None:
        before = limiter.waiter_count()
        threads.append(threading.Thread(target=limiter.run_turn, args=(fork_id,)))
        threads[-1].start()
        while limiter.waiter_count() == before:
            threading.Event().wait(0.001)

    def on_turn(turn: int) -> None:
        if turn == 1:
            for fork_id in ("many", "many", "many", "many", "one", "other"):
                start_reader(fork_id)
        elif turn in (2, 5):
            start_reader("one")

    limiter = RecordingLimiter(on_turn)
    limiter.run_turn("many")
    for thread in threads:
        thread.join(30)
    expected = ["many", "one", "other", "many", "one", "many", "one", "many", "many"]
    assert expected == limiter.served
    assert 0 == limiter.waiter_count()


@pytest.mark.parametrize(("part", "expected"), [(1.0, 1_000_000), (0.25, 250_000)])
def test_one_sided_reads_reduce_the_grants(part: float, expected: int) -> None:
    """The rate applies to all readers together: the share of one-sided readers, which request no grants, is
    deducted.
    """
    assert expected == EgressLimiter(10_000_000, part=lambda: part, clock=FakeClock()).grant(1 << 40, "fork-1")


def test_closing_wakes_waiting_readers() -> None:
    """Closing the instance releases readers that wait for a large debt to be repaid."""
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
