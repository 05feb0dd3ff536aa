"""The latency controller as a table: step durations and rate requests in, limits out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest

from rfork.image.chunks import MIB
from rfork.source.latency_controller import (
    EGRESS_IDLE_S,
    EGRESS_S,
    FORGET_S,
    IDLE_S,
    MAX_IDLE_S,
    UNDISTURBED_S,
    LatencyController,
)
from rfork.source.rate_search import FIRST_RATE, MIN_STEPS
from tests.unit.fake_clock import FakeClock

FLOOR = 8 * MIB
STEP_S = 0.01


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
    assert [None] * 3 == record_steps(controller, clock, [1.2 * STEP_S] * 3, has_readers=True)


def test_steps_without_readers_do_not_change_the_rate() -> None:
    """Their durations, late or not, do not show the effect of egress."""
    clock = FakeClock()
    controller = build_controller(clock)
    record_steps(controller, clock, [1.2 * STEP_S, STEP_S, STEP_S] * 5)
    assert FIRST_RATE == controller.rate(active=True)


@pytest.mark.parametrize(
    ("steps", "pause_s", "expected"),
    [(MIN_STEPS, 0.0, FIRST_RATE), (MIN_STEPS - 1, 0.0, FLOOR), (MIN_STEPS, UNDISTURBED_S, FLOOR), (0, 0.0, FLOOR)],
)
def test_it_begins_with_a_rest_unless_enough_steps_ended_recently(steps: int, pause_s: float, expected: int) -> None:
    """Steps before the first reader are a comparison only if there are enough, and for two seconds."""
    clock = FakeClock()
    controller = build_controller(clock, steps=steps)
    clock.now += pause_s
    with controller.measure_step():
        assert expected == controller.rate(active=True)


@pytest.mark.parametrize(("gap_s", "is_undisturbed"), [(EGRESS_IDLE_S + 0.01, True), (EGRESS_IDLE_S - 0.3, False)])
def test_steps_just_after_a_rate_request_are_not_undisturbed(gap_s: float, is_undisturbed: bool) -> None:
    """A sender that the engine blocks makes no request: only after a second without one do steps count."""
    clock = FakeClock()
    controller = build_controller(clock)
    controller.rate(active=True)
    clock.now += gap_s
    record_steps(controller, clock, [STEP_S] * MIN_STEPS)
    assert (MIN_STEPS if is_undisturbed else 0) == len(controller._undisturbed)


def test_steps_while_no_bytes_are_sent_do_not_count_as_disturbed() -> None:
    """Steps that began after the last bytes were sent do not change the rate."""
    clock = FakeClock()
    controller = build_controller(clock)
    controller.rate(active=True)
    clock.now += EGRESS_S + 0.01
    record_steps(controller, clock, [50 * STEP_S] * 3)
    assert FIRST_RATE == controller.rate(active=False)


@pytest.mark.parametrize(("pause_s", "is_known"), [(FORGET_S - 1, True), (FORGET_S + 1, False)])
def test_the_rate_is_known_for_a_while(pause_s: float, is_known: bool) -> None:
    """The next reader starts at the rate of the last one, unless that is long past."""
    clock = FakeClock()
    controller = build_controller(clock)
    record_steps(controller, clock, [STEP_S] * 500, has_readers=True)
    assert controller.rate(active=False) is None
    record_steps(controller, clock, [STEP_S] * round(pause_s / STEP_S))
    assert (None if is_known else FIRST_RATE) == controller.rate(active=True)


def test_one_long_step_does_not_keep_the_engine_busy() -> None:
    """After a first step of a minute, as for a compilation, the engine counts as idle ten seconds later."""
    clock = FakeClock()
    controller = LatencyController(1.05, floor=lambda: FLOOR, clock=clock)
    record_steps(controller, clock, [60.0])
    clock.now += MAX_IDLE_S - 0.01
    limits = [controller.rate(active=True)]
    clock.now += 0.02
    assert [FLOOR, None] == [*limits, controller.rate(active=True)]


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
    record_steps(controller, clock, [STEP_S] * MIN_STEPS)
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
