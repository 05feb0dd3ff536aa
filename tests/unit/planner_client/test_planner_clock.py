"""The estimate of the planner's time on a source."""

from __future__ import annotations

from rfork.planner_client.planner_clock import PlannerClock

HOUR_S = 3600.0
NOON = 1_000_000.0


class Machine:
    """The two clocks of a machine, set by the test."""

    def __init__(self, wall: float) -> None:
        self.monotonic = 0.0
        self.wall = wall
        self.clock = PlannerClock(lambda: self.monotonic, lambda: self.wall)


def test_a_wrong_wall_clock_does_not_matter() -> None:
    """The planner's response determines the time, and the skew is known."""
    machine = Machine(NOON + HOUR_S)
    machine.clock.record(NOON, 0.0, 0.0)
    assert NOON == machine.clock.now()
    assert machine.clock.skew_s == HOUR_S


def test_setting_the_wall_clock_does_not_matter() -> None:
    """The time advances with the monotonic clock."""
    machine = Machine(NOON)
    machine.clock.record(NOON, 0.0, 0.0)
    machine.monotonic += 10.0
    machine.wall += 10.0 - HOUR_S
    assert NOON + 10.0 == machine.clock.now()
    assert machine.clock.skew_s == -HOUR_S


def test_before_the_first_response_the_wall_clock_is_used() -> None:
    """The skew is unknown until then."""
    clock = Machine(NOON).clock
    assert NOON == clock.now()
    assert clock.skew_s is None


def test_the_fastest_response_counts() -> None:
    """A slow response is less precise."""
    machine = Machine(NOON)
    machine.clock.record(NOON, 0.0, 0.002)
    before = machine.clock.now()
    machine.clock.record(NOON + 1.0, 0.0, 2.0)
    assert before == machine.clock.now()


def test_a_planner_whose_clock_was_set_is_followed() -> None:
    """Even a slow response counts if it contradicts the estimate."""
    machine = Machine(NOON)
    machine.clock.record(NOON, 0.0, 0.0)
    machine.clock.record(NOON + HOUR_S, 0.0, 2.0)
    assert NOON + HOUR_S - 1.0 == machine.clock.now()
