"""Calls that may hang: their result, their error, or the end of the wait."""

from __future__ import annotations

import threading
import time

import pytest

from rfork.errors import CheckpointError, StorageError
from rfork.storage.abandonable_call import AbandonableCall

NEVER_S = 60.0


def broken() -> int:
    raise CheckpointError("invalid")


def test_a_result_or_an_error_is_returned() -> None:
    """A finished call returns its result or raises its error; nothing is undone."""
    undone: list[int] = []
    assert 7 == AbandonableCall("seven", lambda: 7, undone.append).result()
    with pytest.raises(CheckpointError, match="invalid"):
        AbandonableCall("broken", broken, undone.append).result(time.monotonic() + NEVER_S)
    assert [] == undone


def test_every_exception_of_a_call_ends_the_wait() -> None:
    """An exit or an interrupt in the call is raised in the waiting thread."""

    def exit_process() -> int:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        AbandonableCall("left", exit_process, lambda result: None).result(time.monotonic() + NEVER_S)


def test_a_late_result_is_undone() -> None:
    """If the wait has ended, a file that was opened is closed again."""
    resumed, undone = threading.Event(), threading.Event()

    def late() -> int:
        resumed.wait(NEVER_S)
        return 7

    attempt = AbandonableCall("late", late, lambda result: undone.set())
    with pytest.raises(StorageError, match="late: no response"):
        attempt.result(time.monotonic())
    resumed.set()
    assert undone.wait(NEVER_S)
