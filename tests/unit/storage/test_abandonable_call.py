"""Calls that may hang: their result, their error, or an end to the wait."""

from __future__ import annotations

import threading
import time

import pytest

from rfork.errors import CheckpointError, StorageError
from rfork.storage.abandonable_call import AbandonableCall

NEVER_S = 60.0


def broken() -> int:
    raise CheckpointError("not this one")


def test_what_came_or_was_raised() -> None:
    """A call that ends gives what it returned, or raises what it raised; nothing is undone."""
    undone: list[int] = []
    assert 7 == AbandonableCall("seven", lambda: 7, undone.append).result()
    with pytest.raises(CheckpointError, match="not this one"):
        AbandonableCall("broken", broken, undone.append).result(time.monotonic() + NEVER_S)
    assert [] == undone


def test_whatever_a_call_raises_ends_the_wait() -> None:
    """An exit, or an interrupt, of what is called is raised where its result is waited for."""

    def leave() -> int:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        AbandonableCall("left", leave, lambda result: None).result(time.monotonic() + NEVER_S)


def test_what_comes_too_late_is_undone() -> None:
    """Nobody waits any more: what was opened is closed again."""
    resumed, undone = threading.Event(), threading.Event()

    def late() -> int:
        resumed.wait(NEVER_S)
        return 7

    attempt = AbandonableCall("late", late, lambda result: undone.set())
    with pytest.raises(StorageError, match="late: no response"):
        attempt.result(time.monotonic())
    resumed.set()
    assert undone.wait(NEVER_S)
