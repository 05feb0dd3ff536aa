"""Waits that a signal ends at any step."""

from __future__ import annotations

import itertools
import sys
import threading
from types import FrameType

import pytest

from rfork import shutdown
from rfork.shutdown import ShutdownEvent, wait_for_shutdown

STEPS = 60
"""More than one round of the wait has."""


def stops_at_step(step: int) -> bool:
    """Return True if a wait ends that its own thread stops, as a signal handler would, after `step` calls."""
    shutdown_event, steps, results = ShutdownEvent(), itertools.count(), list[bool]()

    def profile_hook(frame: FrameType, event: str, argument: object) -> None:
        if next(steps) == step:
            shutdown_event.set()

    def wait() -> None:
        sys.setprofile(profile_hook)
        try:
            results.append(wait_for_shutdown(shutdown_event, for_s=30))
        finally:
            sys.setprofile(None)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(60)
    return results == [True]


def test_a_stop_is_noticed_at_every_step_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes an interrupt just before and just after the thread waits."""
    monkeypatch.setattr(shutdown, "POLL_INTERVAL_S", 0.001)
    assert [] == [step for step in range(STEPS) if not stops_at_step(step)]


def test_a_wait_times_out() -> None:
    """It returns that no signal arrived."""
    assert not wait_for_shutdown(ShutdownEvent(), for_s=0.01)
