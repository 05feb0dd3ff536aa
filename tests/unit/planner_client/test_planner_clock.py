"""The planner's time as a source knows it."""

from __future__ import annotations

from rfork.planner_client.planner_clock import PlannerClock

HOUR_S = 3600.0
NOON = 1_000_000.0


class Machine:
    """The two clocks of a machine, which a test sets."""

    def __init__(self, wall: float) -> None:
        self.monotonic = 0.0
        self.wall = wall
        self.clock = PlannerClock(lambda: self.monotonic, lambda: self.wall)


def test_a_wall_clock_that_is_an_hour_fast_changes_nothing() -> None:
    """The planner's answer counts, and the skew is known."""
    machine = Machine(NOON + HOUR_S)
    machine.clock.record(NOON, 0.0, 0.0)
    assert NOON == machine.clock.now()
    assert machine.clock.skew_s == HOUR_S


def test_a_step_of_the_wall_clock_changes_nothing() -> None:
    """Time goes on by the monotonic clock."""
    machine = Machine(NOON)
    machine.clock.record(NOON, 0.0, 0.0)
    machine.monotonic += 10.0
    machine.wall += 10.0 - HOUR_S
    assert NOON + 10.0 == machine.clock.now()
    assert machine.clock.skew_s == -HOUR_S


def test_before_the_first_answer_the_wall_clock_is_all_there_is() -> None:
    """And there is nothing to compare it with."""
    clock = Machine(NOON).clock
    assert NOON == clock.now()
    assert clock.skew_s is None


def test_the_quickest_answer_counts() -> None:
    """A slow one says less of when the planner read its clock."""
    machine = Machine(NOON)
    machine.clock.record(NOON, 0.0, 0.002)
    before = machine.clock.now()
    machine.clock.record(NOON + 1.0, 0.0, 2.0)
    assert before == machine.clock.now()


def test_a_planner_whose_clock_was_set_is_followed() -> None:
    """Also by a slow answer, where it contradicts what is known."""
    machine = Machine(NOON)
    machine.clock.record(NOON, 0.0, 0.0)
    machine.clock.record(NOON + HOUR_S, 0.0, 2.0)
    assert NOON + HOUR_S - 1.0 == machine.clock.now()
