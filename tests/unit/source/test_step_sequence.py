"""Durations of overlapping steps, as a table: launches and ends in, durations out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rfork.source.latency_controller import LatencyController
from rfork.source.step_sequence import MAX_RUNNING, StepSequence
from tests.unit.fake_clock import FakeClock

Event = tuple[str, int, float]
"""Type, step and time of an event."""
TABLE: Sequence[tuple[str, list[Event], list[float | None]]] = [
    ("a step alone takes from its launch to its end", [("begin", 1, 10), ("end", 1, 13)], [3]),
    (
        "a step launched early takes from the end of the previous one",
        [("begin", 1, 0), ("begin", 2, 1), ("end", 1, 10), ("begin", 3, 11), ("end", 2, 20), ("end", 3, 31)],
        [10, 10, 11],
    ),
    (
        "idle time before a launch does not count",
        [("begin", 1, 0), ("end", 1, 10), ("begin", 2, 500), ("end", 2, 511)],
        [10, 11],
    ),
    (
        "idle time before two launches does not count",
        [("begin", 1, 0), ("end", 1, 9), ("begin", 2, 100), ("begin", 3, 101), ("end", 2, 110), ("end", 3, 119)],
        [9, 10, 9],
    ),
    (
        "a step after one whose end is unknown is not measured, the next one is",
        [("begin", 1, 0), ("begin", 2, 1), ("begin", 3, 2), ("end", 2, 20), ("end", 1, 21), ("end", 3, 30)],
        [None, None, 10],
    ),
    (
        "a cancelled step does not prevent a measurement",
        [("begin", 1, 0), ("cancel", 1, 1), ("begin", 2, 2), ("end", 1, 3), ("end", 2, 6)],
        [None, 4],
    ),
    ("a step ends once", [("begin", 1, 0), ("end", 1, 2), ("end", 1, 5)], [2, None]),
]


@pytest.mark.parametrize(("events", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_durations(events: list[Event], expected: list[float | None]) -> None:
    """Each end returns the time that the device spent on the step."""
    steps, durations = StepSequence(), []
    for name, step, at in events:
        if name == "begin":
            assert step == steps.begin(at)
        elif name == "cancel":
            steps.cancel(step)
        else:
            durations.append(steps.end(step, at))
    assert expected == durations


def test_the_running_step_has_the_device_since_the_previous_end() -> None:
    """It is not late because it was launched early."""
    steps = StepSequence()
    since = [steps.running_since]
    first, second = steps.begin(0), steps.begin(1)
    since.append(steps.running_since)
    steps.end(first, 10)
    since.append(steps.running_since)
    steps.end(second, 20)
    since.append(steps.running_since)
    assert [None, 0, 10, None] == since


def test_steps_without_reported_ends_do_not_count_as_running() -> None:
    """They do not accumulate, and the engine is not mistaken for a hanging one; measuring resumes with an end."""
    steps = StepSequence()
    for at in range(MAX_RUNNING + 1):
        last = steps.begin(at)
    assert steps.running_since is None
    assert 100 - MAX_RUNNING == steps.end(last, 100)
    steps.begin(200)
    assert 200 == steps.running_since


def test_the_controller_receives_the_durations_of_counted_steps() -> None:
    """An uncounted step ends, so that the time of the next one begins there."""
    clock = FakeClock()
    controller = LatencyController(1.05, clock=clock)
    tracker = controller.track_steps()
    first, second = tracker.begin(), tracker.begin()
    clock.now += 1
    tracker.end(first, counted=False)
    clock.now += 2
    tracker.end(second)
    assert [2] == [seconds for _, seconds in controller._ended]
    assert {} == controller._running
