"""The latency controller as a table: step durations in, rates out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest

from rfork.image.chunks import MIB
from rfork.source.latency_controller import LatencyController
from rfork.source.rate_controller import (
    FIRST_PAUSE_S,
    FIRST_RATE,
    IDLE_S,
    MAX_RATIO,
    MIN_EVIDENCE_STEPS,
    MIN_FACTOR,
    MIN_STEPS,
    REST_SHARE,
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


@pytest.mark.parametrize("concurrent_steps", [1, 2, 8])
def test_concurrent_steps_count_as_one(concurrent_steps: int) -> None:
    """Late batches lower the rate after as many batches as late steps."""
    clock = FakeClock()
    controller = build_controller(clock)
    rates = [controller.rate(active=True)]
    for _ in range(MIN_EVIDENCE_STEPS):
        clock.now += LATE
        for _ in range(concurrent_steps):
            controller.record_step(LATE)
        rates.append(controller.rate(active=True))
    assert [FIRST_RATE] * MIN_EVIDENCE_STEPS == rates[:-1]
    assert rates[-1] == FIRST_RATE * MIN_FACTOR


def test_steps_in_time_end_the_limit() -> None:
    """If egress does not slow the engine down, it is soon not limited at all."""
    clock = FakeClock()
    controller = build_controller(clock)
    rates = record_steps(controller, clock, [IN_TIME] * 60, has_readers=True)
    assert rates[-1] is None


def test_a_late_step_lowers_the_rate_before_it_ends() -> None:
    """Past the maximum ratio it counts once in each usual duration of a step."""
    clock = FakeClock()
    controller = build_controller(clock)
    rates = [controller.rate(active=True)]
    with controller.measure_step():
        clock.now += MAX_RATIO * STEP_S * 1.01
        for _ in range(MIN_EVIDENCE_STEPS):
            rates.append(controller.rate(active=True))
            clock.now += STEP_S * 1.01
    assert [FIRST_RATE] * MIN_EVIDENCE_STEPS == rates[:-1]
    assert rates[-1] == FIRST_RATE * MIN_FACTOR


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


def test_a_hanging_step_does_not_outweigh_normal_steps() -> None:
    """However often the rate is read, steps that end in time end the limit as they would without the hanging one."""
    clock = FakeClock()
    controller = build_controller(clock)
    rates = [controller.rate(active=True)]
    with controller.measure_step():
        for _ in range(300):
            for _ in range(10):
                clock.now += STEP_S / 10
                rates.append(controller.rate(active=True))
            controller.record_step(STEP_S)
    assert rates[-1] is None


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
