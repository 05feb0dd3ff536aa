"""Waits that a signal ends, at whatever step of the wait it comes."""

from __future__ import annotations

import itertools
import sys
import threading
from types import FrameType

import pytest

from rfork import signals
from rfork.signals import Stopped, wait_until

STEPS = 60
"""More than one round of the wait has."""


def heard_at(step: int) -> bool:
    """Whether a wait ends that its own thread stops, as a handler would, so many calls from its start."""
    stopped, steps, heard = Stopped(), itertools.count(), list[bool]()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if next(steps) == step:
            stopped.set()

    def wait() -> None:
        sys.setprofile(look)
        try:
            heard.append(wait_until(stopped, for_s=30))
        finally:
            sys.setprofile(None)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(60)
    return heard == [True]


def test_a_stop_is_heard_at_every_step_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the thread that is interrupted by it is just about to wait, or has just waited."""
    monkeypatch.setattr(signals, "HEARD_S", 0.001)
    assert [] == [step for step in range(STEPS) if not heard_at(step)]


def test_a_wait_ends_by_itself() -> None:
    """And says that nothing came."""
    assert not wait_until(Stopped(), for_s=0.01)
