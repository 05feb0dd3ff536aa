"""The latency guard beside a simulated engine that giving slows down."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rfork.image.chunks import MIB
from rfork.source.latency_controller import LatencyController
from tests.unit.fake_clock import FakeClock

FLOOR = 8 * MIB


class Engine:
    """A seed that serves units one after the other, each slower by what is given meanwhile.

    A unit that takes `base` seconds alone, give or take `jitter`, takes `1 + rate / full` times as long
    while `rate` is given; readers take all they may, up to `link` (bytes a second).
    """

    def __init__(
        self,
        *,
        base: float = 0.01,
        full: float = 3e9,
        link: float = 2.5e9,
        jitter: float = 0.03,
        seed: int = 1,
    ) -> None:
        self.base = base
        self.clock = FakeClock()
        self.controller = LatencyController(1.05, floor=lambda: FLOOR, clock=self.clock)
        self._full = full
        self._link = link
        self._jitter = jitter
        self._chance = random.Random(seed)

    def run(self, seconds: float, *, reads: bool, serves: bool = True) -> tuple[list[float], float]:
        """The units' latencies, and the bytes a second that were given on average."""
        latencies, served_bytes = [], 0.0
        began = self.clock.now
        while self.clock.now - began < seconds:
            if serves:
                latencies.append(self._run_step(reads))
                served_bytes += self._served_bytes
            else:
                self.clock.now += self.base
                served_bytes += self._rate(reads) * self.base
        return latencies, served_bytes / (self.clock.now - began)

    def _run_step(self, reads: bool) -> float:
        began, self._served_bytes = self.clock.now, 0.0
        work = self.base * self._chance.lognormvariate(0, self._jitter)
        tick = self.base / 10
        with self.controller.measure_step():
            while work > 0:
                rate = self._rate(reads)
                elapsed = min(tick, work * (1 + rate / self._full))
                work -= elapsed / (1 + rate / self._full)
                self._served_bytes += rate * elapsed
                self.clock.now += elapsed
        return self.clock.now - began

    def _rate(self, reads: bool) -> float:
        if not reads:
            return 0.0
        rate = self.controller.rate(active=True)
        return self._link if rate is None else min(rate, self._link)


def p99(latencies: Sequence[float]) -> float:
    """The 99th percentile, nearest rank."""
    return sorted(latencies)[math.ceil(0.99 * len(latencies)) - 1]


@pytest.mark.parametrize("base", [0.002, 0.01, 0.1])
@pytest.mark.parametrize("jitter", [0.0, 0.03, 0.1])
def test_the_tail_stays_at_the_setpoint(base: float, jitter: float) -> None:
    """Whatever a unit takes: the 99th percentile grows by no tenth, and what that leaves is given."""
    engine = Engine(base=base, jitter=jitter)
    uncontended, _ = engine.run(max(10.0, 300 * base), reads=False)
    contended, rate = engine.run(max(20.0, 600 * base), reads=True)
    assert (True, True) == (p99(contended) <= 1.1 * p99(uncontended), rate >= 0.01 * 3e9)


def test_the_disturbance_is_not_learnt_as_normal() -> None:
    """After five minutes of reading the latency is what it was in the first."""
    engine = Engine(base=0.02)
    uncontended, _ = engine.run(10, reads=False)
    engine.run(300, reads=True)
    afterwards, _ = engine.run(20, reads=True)
    assert p99(afterwards) <= 1.1 * p99(uncontended)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_load_is_no_disturbance(factor: float) -> None:
    """Units that take half or twice as long by themselves: soon as much is given as before."""
    engine = Engine()
    engine.run(5, reads=False)
    _, before = engine.run(20, reads=True)
    engine.base *= factor
    engine.run(30, reads=True)
    contended, rate = engine.run(20, reads=True)
    uncontended, _ = engine.run(5, reads=False)
    assert (True, True) == (0.4 * before <= rate <= 2.5 * before, p99(contended) <= 1.1 * p99(uncontended))


def test_what_disturbs_nobody_is_not_held_back() -> None:
    """Where giving costs the engine nothing, readers soon have nearly the whole link."""
    engine = Engine(full=1e15)
    engine.run(5, reads=False)
    engine.run(10, reads=True)
    _, rate = engine.run(20, reads=True)
    assert rate >= 0.85 * 2.5e9


def test_when_the_load_goes_so_does_the_limit() -> None:
    """Within a second of the last unit everything may be given."""
    engine = Engine()
    engine.run(5, reads=False)
    engine.run(10, reads=True)
    engine.run(1, reads=True, serves=False)
    _, rate = engine.run(1, reads=True, serves=False)
    assert pytest.approx(2.5e9) == rate


@settings(max_examples=40)
@given(
    base=st.floats(0.001, 0.3),
    full=st.floats(1e7, 1e12),
    jitter=st.floats(0, 0.8),
    seed=st.integers(0, 1 << 16),
    warm=st.booleans(),
)
def test_nobody_ever_starves(base: float, full: float, jitter: float, seed: int, warm: bool) -> None:
    """However the engine behaves, readers get the floor at least, and all of it once it idles."""
    engine = Engine(base=base, full=full, jitter=jitter, seed=seed)
    if warm:
        engine.run(20 * base, reads=False)
    _, busy = engine.run(100 * base, reads=True)
    engine.run(max(1.0, 30 * base), reads=True, serves=False)
    _, idle = engine.run(1, reads=True, serves=False)
    assert (True, 2_500_000_000) == (busy >= FLOOR * 0.999, round(idle))
