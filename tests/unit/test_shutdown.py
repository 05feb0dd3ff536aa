"""Waits that a signal ends, at whatever step of the wait it comes."""

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
    """Whether a wait ends that its own thread stops, as a handler would, so many calls from its start."""
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


def test_a_stop_is_heard_at_every_step_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the thread that is interrupted by it is just about to wait, or has just waited."""
    monkeypatch.setattr(shutdown, "POLL_INTERVAL_S", 0.001)
    assert [] == [step for step in range(STEPS) if not stops_at_step(step)]


def test_a_wait_ends_by_itself() -> None:
    """And says that nothing came."""
    assert not wait_for_shutdown(ShutdownEvent(), for_s=0.01)
