"""The latency controller with a simulated engine that egress slows down."""

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
ALLOWED = 0.05
DRIFT_S = 2.0


class Engine:
    """A seed that runs one step after the other; egress during a step slows it down.

    A step of `base` seconds, which varies by `jitter`, takes `1 + rate / full` times as long while `rate` is
    sent. The speed of the host drifts by `drift` within `DRIFT_S` seconds. Readers read as fast as they are allowed,
    up to `link` bytes per second.
    """

    def __init__(
        self,
        *,
        base: float = 0.01,
        full: float = 3e9,
        link: float = 2.5e9,
        jitter: float = 0.03,
        drift: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.base = base
        self.clock = FakeClock()
        self.controller = LatencyController(1 + ALLOWED, floor=lambda: FLOOR, clock=self.clock)
        self._full = full
        self._link = link
        self._jitter = jitter
        self._drift, self._level = drift, 0.0
        self._random = random.Random(seed)

    def run(self, seconds: float, *, reads: bool, serves: bool = True) -> tuple[list[float], float]:
        """Return the latencies of the steps and the mean egress in bytes per second."""
        latencies, served_bytes = [], 0.0
        started_at = self.clock.now
        while self.clock.now - started_at < seconds:
            if serves:
                latencies.append(self._run_step(reads))
                served_bytes += self._served_bytes
            else:
                self.clock.now += self.base
                served_bytes += self._rate(reads) * self.base
        return latencies, served_bytes / (self.clock.now - started_at)

    def _run_step(self, reads: bool) -> float:
        started_at, self._served_bytes = self.clock.now, 0.0
        pace = self.base / DRIFT_S
        self._level += -pace * self._level + math.sqrt(2 * pace) * self._random.gauss(0, self._drift)
        work = self.base * math.exp(self._level) * self._random.lognormvariate(0, self._jitter)
        tick = self.base / 10
        with self.controller.measure_step():
            while work > 0:
                rate = self._rate(reads)
                elapsed = min(tick, work * (1 + rate / self._full))
                work -= elapsed / (1 + rate / self._full)
                self._served_bytes += rate * elapsed
                self.clock.now += elapsed
        return self.clock.now - started_at

    def _rate(self, reads: bool) -> float:
        if not reads:
            return 0.0
        rate = self.controller.rate(active=True)
        return self._link if rate is None else min(rate, self._link)


def p99(latencies: Sequence[float]) -> float:
    """Return the 99th percentile (nearest rank)."""
    return sorted(latencies)[math.ceil(0.99 * len(latencies)) - 1]


@pytest.mark.parametrize("base", [0.002, 0.01, 0.1])
@pytest.mark.parametrize("jitter", [0.0, 0.03, 0.1])
def test_the_tail_stays_at_the_setpoint(base: float, jitter: float) -> None:
    """For any step duration, the 99th percentile grows by at most a tenth, and the remaining bandwidth is
    used.
    """
    engine = Engine(base=base, jitter=jitter)
    uncontended, _ = engine.run(max(10.0, 300 * base), reads=False)
    contended, rate = engine.run(max(20.0, 600 * base), reads=True)
    assert p99(contended) <= 1.1 * p99(uncontended)
    assert rate >= 0.01 * 3e9


def test_the_disturbance_does_not_become_the_baseline() -> None:
    """After five minutes of reads, the latency has not grown."""
    engine = Engine(base=0.02)
    uncontended, _ = engine.run(10, reads=False)
    engine.run(300, reads=True)
    afterwards, _ = engine.run(20, reads=True)
    assert p99(afterwards) <= 1.1 * p99(uncontended)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_different_load_is_not_a_disturbance(factor: float) -> None:
    """If steps become twice or half as long by themselves, egress soon returns to its former rate."""
    engine = Engine()
    engine.run(5, reads=False)
    _, before = engine.run(20, reads=True)
    engine.base *= factor
    engine.run(30, reads=True)
    contended, rate = engine.run(20, reads=True)
    uncontended, _ = engine.run(5, reads=False)
    assert 0.4 * before <= rate <= 2.5 * before
    assert p99(contended) <= 1.1 * p99(uncontended)


def test_harmless_egress_is_not_limited() -> None:
    """If egress does not slow the engine down, readers soon use nearly all of the link."""
    engine = Engine(full=1e15)
    engine.run(5, reads=False)
    engine.run(10, reads=True)
    _, rate = engine.run(20, reads=True)
    assert rate >= 0.85 * 2.5e9


@pytest.mark.parametrize("seed", range(5))
def test_the_speed_of_a_noisy_host_is_not_an_effect(seed: int) -> None:
    """Steps vary by a quarter, and the host's speed by 15 % within seconds: readers soon use most of the link all
    the same, and if egress does slow the engine down, by about the allowed slowdown.
    """
    harmless = Engine(base=0.002, full=1e15, jitter=0.25, drift=0.15, seed=seed)
    harmless.run(3, reads=False)
    harmless.run(20, reads=True)
    _, rate = harmless.run(20, reads=True)
    assert rate >= 0.5 * 2.5e9
    harmful = Engine(base=0.002, jitter=0.25, drift=0.15, seed=seed)
    harmful.run(3, reads=False)
    _, rate = harmful.run(40, reads=True)
    assert 0.3 * ALLOWED <= rate / 3e9 <= 1.5 * ALLOWED


def test_the_limit_ends_with_the_load() -> None:
    """Within a second of the last step, readers use all of the link."""
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
def test_readers_never_starve(base: float, full: float, jitter: float, seed: int, warm: bool) -> None:
    """Whatever the engine does, readers receive at least the floor, and all of the link once it is idle."""
    engine = Engine(base=base, full=full, jitter=jitter, seed=seed)
    if warm:
        engine.run(20 * base, reads=False)
    _, busy = engine.run(100 * base, reads=True)
    engine.run(max(1.0, 30 * base), reads=True, serves=False)
    _, idle = engine.run(1, reads=True, serves=False)
    assert busy >= FLOOR * 0.999
    assert 2_500_000_000 == round(idle)
