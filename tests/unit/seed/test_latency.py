"""The latency guard: literal units in, rates out."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Sequence

import pytest

from rfork.image.chunks import MIB
from rfork.seed.baseline import FEWEST_UNITS, KEPT_UNITS, LEAST_GAIN, MOST_GAIN, WORST, Baseline
from rfork.seed.latency import FIRST_RATE, FIRST_REST_S, IDLE_S, MOST_RATE, REST_SHARE, LatencyGuard
from tests.unit.clock import Clock

FLOOR = 8 * MIB
UNIT_S = 0.01
IN_TIME, LATE = UNIT_S, UNIT_S * 1.2


def guard_of(clock: Clock, setpoint: float = 1.05, *, units: int = 20) -> LatencyGuard:
    """A guard that has seen so many units of 10 ms while nobody read."""
    guard = LatencyGuard(setpoint, floor=lambda: FLOOR, clock=clock)
    serve(guard, clock, [UNIT_S] * units)
    return guard


def serve(
    guard: LatencyGuard, clock: Clock, units: Sequence[float], *, giving: bool = False
) -> list[int | None]:
    """One unit after the other; the rate after each."""
    rates = []
    for seconds in units:
        clock.now += seconds
        guard.observe(seconds)
        rates.append(guard.rate(giving=giving))
    return rates


def test_while_nothing_is_served_there_is_no_limit() -> None:
    """Whether nothing ever was, or not lately."""
    clock = Clock()
    fresh = LatencyGuard(1.05, clock=clock).rate(giving=True)
    guard = guard_of(clock)
    served = guard.rate(giving=True)
    clock.now += IDLE_S + 0.01
    assert [None, FIRST_RATE, None] == [fresh, served, guard.rate(giving=True)]


def test_setpoint_zero_turns_it_off() -> None:
    """Then nothing that the engine says makes a limit."""
    clock = Clock()
    guard = guard_of(clock, setpoint=0)
    assert [None] * 3 == serve(guard, clock, [LATE] * 3, giving=True)


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ([IN_TIME], FIRST_RATE * math.exp(MOST_GAIN * 0.05)),
        ([LATE], FIRST_RATE * math.exp(-MOST_GAIN * 0.15)),
        ([LATE, LATE], FIRST_RATE * math.exp(-MOST_GAIN * 0.3)),
        ([LATE, IN_TIME, IN_TIME, IN_TIME], FIRST_RATE),
        ([UNIT_S * 1.05], FIRST_RATE),
        ([UNIT_S * WORST], FIRST_RATE / 2),
        ([0.3] * 5, FLOOR),
        ([0.0], FIRST_RATE * math.exp(MOST_GAIN * 1.05)),
    ],
    ids=[
        "in time",
        "late",
        "two late",
        "evened out",
        "at the setpoint",
        "at the worst",
        "far too late",
        "none",
    ],
)
def test_each_unit_moves_the_rate(units: list[float], expected: float) -> None:
    """Late ones down and others up, by how far they are from the setpoint; never below the floor."""
    clock = Clock()
    guard = guard_of(clock)
    guard.rate(giving=True)
    assert pytest.approx(expected, rel=1e-6) == serve(guard, clock, units, giving=True)[-1]


@pytest.mark.parametrize(
    ("units", "expected"),
    [([0.01] * 20, MOST_GAIN), ([0.008, 0.012] * 10, 0.125), ([0.001, 0.019] * 10, LEAST_GAIN)],
)
def test_the_more_units_differ_the_less_one_counts(units: list[float], expected: float) -> None:
    """The gain is NOISE over their variance (in means), within bounds."""
    baseline = Baseline()
    for index, seconds in enumerate(units):
        baseline.add(float(index), seconds, resting=False)
    baseline.measure(0.0)
    assert pytest.approx([0.01, expected]) == [baseline.mean, baseline.gain]


@pytest.mark.parametrize("side_by_side", [1, 2, 8])
def test_units_side_by_side_are_one(side_by_side: int) -> None:
    """A batch that is late lowers the rate as one late unit does."""
    clock = Clock()
    guard = guard_of(clock)
    guard.rate(giving=True)
    clock.now += LATE
    for _ in range(side_by_side):
        guard.observe(LATE)
    assert pytest.approx(FIRST_RATE * math.exp(-MOST_GAIN * 0.15), rel=1e-6) == guard.rate(giving=True)


def test_the_rate_is_bounded_above() -> None:
    """It does not grow for ever while it limits nobody."""
    clock = Clock()
    guard = guard_of(clock)
    rates = serve(guard, clock, [IN_TIME] * 1000, giving=True)
    assert MOST_RATE == max(rate for rate in rates if rate is not None)


def test_units_nobody_read_beside_change_no_rate() -> None:
    """Late or not, they say nothing of what giving does."""
    clock = Clock()
    guard = guard_of(clock)
    serve(guard, clock, [LATE, IN_TIME, IN_TIME] * 5)
    assert FIRST_RATE == guard.rate(giving=True)


def test_who_gives_for_long_rests_a_tenth_of_the_time() -> None:
    """In a rest only the floor is given: what a unit takes then is the baseline."""
    clock = Clock()
    guard = guard_of(clock)
    rates = serve(guard, clock, [UNIT_S] * 10_000, giving=True)
    resting = sum(rate == FLOOR for rate in rates) / len(rates)
    assert pytest.approx(REST_SHARE, rel=0.1) == resting


def test_without_a_baseline_it_rests_first() -> None:
    """An engine that begins to serve while somebody reads: the floor, until enough units are known."""
    clock = Clock()
    guard = LatencyGuard(1.05, floor=lambda: FLOOR, clock=clock)
    rates = serve(guard, clock, [UNIT_S] * 30, giving=True)
    known = next(index for index, rate in enumerate(rates) if rate != FLOOR)
    assert (True, FIRST_RATE) == (FEWEST_UNITS <= known + 1 <= 2 * FEWEST_UNITS, rates[known])


def test_without_a_baseline_it_does_not_rest_for_ever() -> None:
    """Units of a minute make no baseline; what is given is then the first rate."""
    clock = Clock()
    guard = LatencyGuard(1.05, floor=lambda: FLOOR, clock=clock)
    with guard.serving():
        rates = []
        for _ in range(round(FIRST_REST_S / 0.1) + 2):
            rates.append(guard.rate(giving=True))
            clock.now += 0.1
    assert (FLOOR, FIRST_RATE) == (rates[0], rates[-1])


def test_a_unit_under_way_counts_as_serving() -> None:
    """From its first moment, however long it takes, until it ends."""
    clock = Clock()
    guard = guard_of(clock)
    clock.now += 60
    rates = [guard.rate(giving=True)]
    with guard.serving():
        rates.append(guard.rate(giving=True))
        clock.now += 60
        rates.append(guard.rate(giving=True))
    clock.now += 60
    rates.append(guard.rate(giving=True))
    assert [True, False, False, True] == [rate is None for rate in rates]


def test_a_unit_that_is_late_already_is_not_waited_for() -> None:
    """Past the worst that counts it lowers the rate while it runs, and no more when it ends."""
    clock = Clock()
    guard = guard_of(clock)
    rates = [guard.rate(giving=True)]
    with guard.serving():
        for _ in range(3):
            clock.now += WORST * UNIT_S * 0.51
            rates.append(guard.rate(giving=True))
    rates.append(guard.rate(giving=True))
    halved, lowered = FIRST_RATE // 2, rates[3] or 0
    assert [FIRST_RATE, FIRST_RATE, halved, lowered, lowered] == rates
    assert lowered < halved


def test_a_unit_that_hangs_does_not_speak_for_the_others() -> None:
    """However often the rate is asked for: those that end in time raise it as they would without that one."""
    rates = []
    for hangs in (False, True):
        clock = Clock()
        guard = guard_of(clock)
        guard.rate(giving=True)
        with contextlib.ExitStack() as hanging:
            if hangs:
                hanging.enter_context(guard.serving())
            for _ in range(800):
                for _ in range(10):
                    clock.now += UNIT_S / 10
                    rate = guard.rate(giving=True)
                guard.observe(UNIT_S)
        rates.append(rate or 0)
    assert (True, True) == (rates[0] > FIRST_RATE, rates[1] > rates[0] / 2)


def test_a_unit_that_failed_counts_for_nothing() -> None:
    """What raises after a minute says nothing of what a unit takes."""
    clock = Clock()
    guard = guard_of(clock)

    def fail() -> None:
        with guard.serving():
            clock.now += 60
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fail()
    serve(guard, clock, [UNIT_S])
    assert FIRST_RATE == guard.rate(giving=True)


def test_only_who_reads_is_held() -> None:
    """What the planner is told is a limit that is felt, not one that nobody has met."""
    clock = Clock()
    guard = guard_of(clock)
    told = [guard.held()]
    guard.rate(giving=True)
    told.append(guard.held())
    clock.now += 60
    told.append(guard.held())
    assert [None, FIRST_RATE, None] == told


def test_many_threads_may_tell_at_once() -> None:
    """Serving threads tell of units while others ask for the rate."""
    ticks = itertools.count()  # not the machine's clock: it may stand still here for longer than work counts
    guard = LatencyGuard(1.05, clock=lambda: next(ticks) * 1e-9)
    done = threading.Event()

    def tell() -> None:
        for _ in range(2000):
            with guard.serving():
                pass

    def ask() -> None:
        while not done.is_set():
            guard.rate(giving=True)

    threads = [threading.Thread(target=tell) for _ in range(4)]
    asking = threading.Thread(target=ask)
    asking.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    done.set()
    asking.join(30)
    assert guard.rate(giving=True) is not None


@pytest.mark.parametrize(("rested", "expected"), [(KEPT_UNITS - 1, 0.02), (KEPT_UNITS, 0.01)])
def test_units_of_rests_are_the_better_baseline(rested: int, expected: float) -> None:
    """Once there are enough of them, those from before the readers came count for nothing."""
    baseline = Baseline()
    others = 2 * KEPT_UNITS
    for _ in range(others):
        baseline.add(0.0, 0.02 + 0.01 * rested / others * (rested < KEPT_UNITS), resting=False)
    for _ in range(rested):
        baseline.add(0.0, 0.01, resting=True)
    baseline.measure(0.0)
    assert pytest.approx(expected) == baseline.mean
