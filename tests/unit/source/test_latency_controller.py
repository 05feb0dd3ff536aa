"""The latency guard: literal units in, rates out."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Sequence

import pytest

from rfork.image.chunks import MIB
from rfork.source.latency_baseline import (
    MAX_GAIN,
    MAX_RATIO,
    MIN_GAIN,
    MIN_STEPS,
    RECENT_STEPS,
    LatencyBaseline,
)
from rfork.source.latency_controller import (
    FIRST_PAUSE_S,
    FIRST_RATE,
    IDLE_S,
    MAX_RATE,
    REST_SHARE,
    LatencyController,
)
from tests.unit.fake_clock import FakeClock

FLOOR = 8 * MIB
STEP_S = 0.01
IN_TIME, LATE = STEP_S, STEP_S * 1.2


def build_controller(clock: FakeClock, max_ratio: float = 1.05, *, steps: int = 20) -> LatencyController:
    """A guard that has seen so many units of 10 ms while nobody read."""
    controller = LatencyController(max_ratio, floor=lambda: FLOOR, clock=clock)
    record_steps(controller, clock, [STEP_S] * steps)
    return controller


def record_steps(
    controller: LatencyController, clock: FakeClock, steps: Sequence[float], *, has_readers: bool = False
) -> list[int | None]:
    """One unit after the other; the rate after each."""
    rates = []
    for seconds in steps:
        clock.now += seconds
        controller.record_step(seconds)
        rates.append(controller.rate(active=has_readers))
    return rates


def test_while_nothing_is_served_there_is_no_limit() -> None:
    """Whether nothing ever was, or not lately."""
    clock = FakeClock()
    fresh = LatencyController(1.05, clock=clock).rate(active=True)
    controller = build_controller(clock)
    served = controller.rate(active=True)
    clock.now += IDLE_S + 0.01
    assert [None, FIRST_RATE, None] == [fresh, served, controller.rate(active=True)]


def test_setpoint_zero_turns_it_off() -> None:
    """Then nothing that the engine says makes a limit."""
    clock = FakeClock()
    controller = build_controller(clock, max_ratio=0)
    assert [None] * 3 == record_steps(controller, clock, [LATE] * 3, has_readers=True)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([IN_TIME], FIRST_RATE * math.exp(MAX_GAIN * 0.05)),
        ([LATE], FIRST_RATE * math.exp(-MAX_GAIN * 0.15)),
        ([LATE, LATE], FIRST_RATE * math.exp(-MAX_GAIN * 0.3)),
        ([LATE, IN_TIME, IN_TIME, IN_TIME], FIRST_RATE),
        ([STEP_S * 1.05], FIRST_RATE),
        ([STEP_S * MAX_RATIO], FIRST_RATE / 2),
        ([0.3] * 5, FLOOR),
        ([0.0], FIRST_RATE * math.exp(MAX_GAIN * 1.05)),
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
def test_each_unit_moves_the_rate(steps: list[float], expected: float) -> None:
    """Late ones down and others up, by how far they are from the setpoint; never below the floor."""
    clock = FakeClock()
    controller = build_controller(clock)
    controller.rate(active=True)
    assert pytest.approx(expected, rel=1e-6) == record_steps(controller, clock, steps, has_readers=True)[-1]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [([0.01] * 20, MAX_GAIN), ([0.008, 0.012] * 10, 0.125), ([0.001, 0.019] * 10, MIN_GAIN)],
)
def test_the_more_units_differ_the_less_one_counts(steps: list[float], expected: float) -> None:
    """The gain is NOISE over their variance (in means), within bounds."""
    baseline = LatencyBaseline()
    for index, seconds in enumerate(steps):
        baseline.add(float(index), seconds, resting=False)
    baseline.measure(0.0)
    assert pytest.approx([0.01, expected]) == [baseline.mean, baseline.gain]


@pytest.mark.parametrize("side_by_side", [1, 2, 8])
def test_units_side_by_side_are_one(side_by_side: int) -> None:
    """A batch that is late lowers the rate as one late unit does."""
    clock = FakeClock()
    controller = build_controller(clock)
    controller.rate(active=True)
    clock.now += LATE
    for _ in range(side_by_side):
        controller.record_step(LATE)
    assert pytest.approx(FIRST_RATE * math.exp(-MAX_GAIN * 0.15), rel=1e-6) == controller.rate(active=True)


def test_the_rate_is_bounded_above() -> None:
    """It does not grow for ever while it limits nobody."""
    clock = FakeClock()
    controller = build_controller(clock)
    rates = record_steps(controller, clock, [IN_TIME] * 1000, has_readers=True)
    assert MAX_RATE == max(rate for rate in rates if rate is not None)


def test_units_nobody_read_beside_change_no_rate() -> None:
    """Late or not, they say nothing of what giving does."""
    clock = FakeClock()
    controller = build_controller(clock)
    record_steps(controller, clock, [LATE, IN_TIME, IN_TIME] * 5)
    assert FIRST_RATE == controller.rate(active=True)


def test_who_gives_for_long_rests_a_tenth_of_the_time() -> None:
    """In a rest only the floor is given: what a unit takes then is the baseline."""
    clock = FakeClock()
    controller = build_controller(clock)
    rates = record_steps(controller, clock, [STEP_S] * 10_000, has_readers=True)
    resting = sum(rate == FLOOR for rate in rates) / len(rates)
    assert pytest.approx(REST_SHARE, rel=0.1) == resting


def test_without_a_baseline_it_rests_first() -> None:
    """An engine that begins to serve while somebody reads: the floor, until enough units are known."""
    clock = FakeClock()
    controller = LatencyController(1.05, floor=lambda: FLOOR, clock=clock)
    rates = record_steps(controller, clock, [STEP_S] * 30, has_readers=True)
    known = next(index for index, rate in enumerate(rates) if rate != FLOOR)
    assert (True, FIRST_RATE) == (MIN_STEPS <= known + 1 <= 2 * MIN_STEPS, rates[known])


def test_without_a_baseline_it_does_not_rest_for_ever() -> None:
    """Units of a minute make no baseline; what is given is then the first rate."""
    clock = FakeClock()
    controller = LatencyController(1.05, floor=lambda: FLOOR, clock=clock)
    with controller.measure_step():
        rates = []
        for _ in range(round(FIRST_PAUSE_S / 0.1) + 2):
            rates.append(controller.rate(active=True))
            clock.now += 0.1
    assert (FLOOR, FIRST_RATE) == (rates[0], rates[-1])


def test_a_unit_under_way_counts_as_serving() -> None:
    """From its first moment, however long it takes, until it ends."""
    clock = FakeClock()
    controller = build_controller(clock)
    clock.now += 60
    rates = [controller.rate(active=True)]
    with controller.measure_step():
        rates.append(controller.rate(active=True))
        clock.now += 60
        rates.append(controller.rate(active=True))
    clock.now += 60
    rates.append(controller.rate(active=True))
    assert [True, False, False, True] == [rate is None for rate in rates]


def test_a_unit_that_is_late_already_is_not_waited_for() -> None:
    """Past the worst that counts it lowers the rate while it runs, and no more when it ends."""
    clock = FakeClock()
    controller = build_controller(clock)
    rates = [controller.rate(active=True)]
    with controller.measure_step():
        for _ in range(3):
            clock.now += MAX_RATIO * STEP_S * 0.51
            rates.append(controller.rate(active=True))
    rates.append(controller.rate(active=True))
    halved, lowered = FIRST_RATE // 2, rates[3] or 0
    assert [FIRST_RATE, FIRST_RATE, halved, lowered, lowered] == rates
    assert lowered < halved


def test_a_unit_that_hangs_does_not_speak_for_the_others() -> None:
    """However often the rate is asked for: those that end in time raise it as they would without that one."""
    rates = []
    for has_hung_step in (False, True):
        clock = FakeClock()
        controller = build_controller(clock)
        controller.rate(active=True)
        with contextlib.ExitStack() as hung_step:
            if has_hung_step:
                hung_step.enter_context(controller.measure_step())
            for _ in range(800):
                for _ in range(10):
                    clock.now += STEP_S / 10
                    rate = controller.rate(active=True)
                controller.record_step(STEP_S)
        rates.append(rate or 0)
    assert (True, True) == (rates[0] > FIRST_RATE, rates[1] > rates[0] / 2)


def test_a_unit_that_failed_counts_for_nothing() -> None:
    """What raises after a minute says nothing of what a unit takes."""
    clock = FakeClock()
    controller = build_controller(clock)

    def fail() -> None:
        with controller.measure_step():
            clock.now += 60
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fail()
    record_steps(controller, clock, [STEP_S])
    assert FIRST_RATE == controller.rate(active=True)


def test_only_who_reads_is_held() -> None:
    """What the planner is told is a limit that is felt, not one that nobody has met."""
    clock = FakeClock()
    controller = build_controller(clock)
    limits = [controller.current_limit()]
    controller.rate(active=True)
    limits.append(controller.current_limit())
    clock.now += 60
    limits.append(controller.current_limit())
    assert [None, FIRST_RATE, None] == limits


def test_many_threads_may_tell_at_once() -> None:
    """Serving threads tell of units while others ask for the rate."""
    ticks = itertools.count()  # not the machine's clock: it may stand still here for longer than work counts
    controller = LatencyController(1.05, clock=lambda: next(ticks) * 1e-9)
    done = threading.Event()

    def record_reads() -> None:
        for _ in range(2000):
            with controller.measure_step():
                pass

    def poll_rate() -> None:
        while not done.is_set():
            controller.rate(active=True)

    threads = [threading.Thread(target=record_reads) for _ in range(4)]
    poll_thread = threading.Thread(target=poll_rate)
    poll_thread.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    done.set()
    poll_thread.join(30)
    assert controller.rate(active=True) is not None


@pytest.mark.parametrize(("rested", "expected"), [(RECENT_STEPS - 1, 0.02), (RECENT_STEPS, 0.01)])
def test_units_of_rests_are_the_better_baseline(rested: int, expected: float) -> None:
    """Once there are enough of them, those from before the readers came count for nothing."""
    baseline = LatencyBaseline()
    others = 2 * RECENT_STEPS
    for _ in range(others):
        baseline.add(0.0, 0.02 + 0.01 * rested / others * (rested < RECENT_STEPS), resting=False)
    for _ in range(rested):
        baseline.add(0.0, 0.01, resting=True)
    baseline.measure(0.0)
    assert pytest.approx(expected) == baseline.mean
