"""The latency controller as a table: step durations in, rates out."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Sequence

import pytest

from rfork.image.chunks import MIB
from rfork.source.latency_controller import (
    FIRST_PAUSE_S,
    FIRST_RATE,
    IDLE_S,
    MAX_GAIN,
    MAX_RATE,
    MAX_RATIO,
    MIN_GAIN,
    MIN_STEPS,
    RECENT_STEPS,
    REST_SHARE,
    LatencyBaseline,
    LatencyController,
)
from tests.unit.fake_clock import FakeClock

FLOOR = 8 * MIB
STEP_S = 0.01
IN_TIME, LATE = STEP_S, STEP_S * 1.2


def build_controller(clock: FakeClock, max_ratio: float = 1.05, *, steps: int = 20) -> LatencyController:
    """Return a controller that has recorded this many steps of 10 ms without readers."""
    controller = LatencyController(max_ratio, floor=lambda: FLOOR, clock=clock)
    record_steps(controller, clock, [STEP_S] * steps)
    return controller


def record_steps(
    controller: LatencyController, clock: FakeClock, steps: Sequence[float], *, has_readers: bool = False
) -> list[int | None]:
    """Record one step after the other; return the rate after each."""
    rates = []
    for seconds in steps:
        clock.now += seconds
        controller.record_step(seconds)
        rates.append(controller.rate(active=has_readers))
    return rates


def test_an_idle_instance_has_no_limit() -> None:
    """There is no limit before the first step, nor when the last step is long past."""
    clock = FakeClock()
    assert LatencyController(1.05, clock=clock).rate(active=True) is None
    controller = build_controller(clock)
    assert FIRST_RATE == controller.rate(active=True)
    clock.now += IDLE_S + 0.01
    assert controller.rate(active=True) is None


def test_setpoint_zero_turns_it_off() -> None:
    """No recorded step results in a limit."""
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
        "balanced",
        "at the setpoint",
        "at the maximum ratio",
        "far too late",
        "none",
    ],
)
def test_each_step_changes_the_rate(steps: list[float], expected: float) -> None:
    """Late steps lower the rate and others raise it, by their distance from the setpoint; the floor is the
    minimum.
    """
    clock = FakeClock()
    controller = build_controller(clock)
    controller.rate(active=True)
    assert pytest.approx(expected, rel=1e-6) == record_steps(controller, clock, steps, has_readers=True)[-1]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [([0.01] * 20, MAX_GAIN), ([0.008, 0.012] * 10, 0.125), ([0.001, 0.019] * 10, MIN_GAIN)],
)
def test_the_gain_decreases_with_the_variance(steps: list[float], expected: float) -> None:
    """The gain is NOISE divided by the variance (relative to the mean), within bounds."""
    baseline = LatencyBaseline()
    for index, seconds in enumerate(steps):
        baseline.add(float(index), seconds, resting=False)
    baseline.measure(0.0)
    assert pytest.approx([0.01, expected]) == [baseline.mean, baseline.gain]


@pytest.mark.parametrize("concurrent_steps", [1, 2, 8])
def test_concurrent_steps_count_as_one(concurrent_steps: int) -> None:
    """A late batch lowers the rate as much as one late step."""
    clock = FakeClock()
    controller = build_controller(clock)
    controller.rate(active=True)
    clock.now += LATE
    for _ in range(concurrent_steps):
        controller.record_step(LATE)
    assert pytest.approx(FIRST_RATE * math.exp(-MAX_GAIN * 0.15), rel=1e-6) == controller.rate(active=True)


def test_the_rate_is_bounded_above() -> None:
    """The rate does not grow without bound while it limits no reader."""
    clock = FakeClock()
    controller = build_controller(clock)
    rates = record_steps(controller, clock, [IN_TIME] * 1000, has_readers=True)
    assert MAX_RATE == max(rate for rate in rates if rate is not None)


def test_steps_without_readers_do_not_change_the_rate() -> None:
    """Their durations, late or not, do not show the effect of egress."""
    clock = FakeClock()
    controller = build_controller(clock)
    record_steps(controller, clock, [LATE, IN_TIME, IN_TIME] * 5)
    assert FIRST_RATE == controller.rate(active=True)


def test_long_transfers_pause_for_a_tenth_of_the_time() -> None:
    """In a pause only the floor is sent; the steps during it are the baseline."""
    clock = FakeClock()
    controller = build_controller(clock)
    rates = record_steps(controller, clock, [STEP_S] * 10_000, has_readers=True)
    pause_share = sum(rate == FLOOR for rate in rates) / len(rates)
    assert pytest.approx(REST_SHARE, rel=0.1) == pause_share


def test_without_a_baseline_it_pauses_first() -> None:
    """If an engine begins to serve while it has readers, the rate is the floor until enough steps are known."""
    clock = FakeClock()
    controller = LatencyController(1.05, floor=lambda: FLOOR, clock=clock)
    rates = record_steps(controller, clock, [STEP_S] * 30, has_readers=True)
    first_known = next(index for index, rate in enumerate(rates) if rate != FLOOR)
    assert MIN_STEPS <= first_known + 1 <= 2 * MIN_STEPS
    assert FIRST_RATE == rates[first_known]


def test_the_first_pause_is_bounded() -> None:
    """If a step is too long to provide a baseline, the rate becomes the first rate."""
    clock = FakeClock()
    controller = LatencyController(1.05, floor=lambda: FLOOR, clock=clock)
    with controller.measure_step():
        rates = []
        for _ in range(round(FIRST_PAUSE_S / 0.1) + 2):
            rates.append(controller.rate(active=True))
            clock.now += 0.1
    assert FLOOR == rates[0]
    assert FIRST_RATE == rates[-1]


def test_a_running_step_counts_as_serving() -> None:
    """It counts from its start to its end, however long it runs."""
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


def test_a_late_step_lowers_the_rate_before_it_ends() -> None:
    """Past the maximum ratio it lowers the rate while it runs, and does not lower it again when it ends."""
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


def test_a_hanging_step_does_not_outweigh_normal_steps() -> None:
    """However often the rate is read, steps that end in time raise it as they would without the hanging one."""
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
    assert rates[0] > FIRST_RATE
    assert rates[1] > rates[0] / 2


def test_a_failed_step_is_ignored() -> None:
    """A step that raises after a minute does not change the rate."""
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


def test_the_current_limit_requires_readers() -> None:
    """The limit is reported to the planner only while it affects a reader."""
    clock = FakeClock()
    controller = build_controller(clock)
    limits = [controller.current_limit()]
    controller.rate(active=True)
    limits.append(controller.current_limit())
    clock.now += 60
    limits.append(controller.current_limit())
    assert [None, FIRST_RATE, None] == limits


def test_steps_are_recorded_from_many_threads() -> None:
    """Serving threads record steps while other threads read the rate."""
    ticks = itertools.count()  # not the system clock: it may stall here for longer than a step counts as recent
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


@pytest.mark.parametrize(("pause_steps", "expected"), [(RECENT_STEPS - 1, 0.02), (RECENT_STEPS, 0.01)])
def test_steps_during_pauses_are_preferred_as_baseline(pause_steps: int, expected: float) -> None:
    """With enough of them, steps from before the first reader no longer count."""
    baseline = LatencyBaseline()
    other_count = 2 * RECENT_STEPS
    for _ in range(other_count):
        baseline.add(0.0, 0.02 + 0.01 * pause_steps / other_count * (pause_steps < RECENT_STEPS), resting=False)
    for _ in range(pause_steps):
        baseline.add(0.0, 0.01, resting=True)
    baseline.measure(0.0)
    assert pytest.approx(expected) == baseline.mean
