"""Threads that stand back, where they may and where they may not."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from rfork.niceness import made_standing_back, stand_back

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a niceness is the process's here")


def nice() -> int:
    """The calling thread's."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_threads_that_are_started_stand_back() -> None:
    """Whoever has them made goes on as before."""
    before = nice()
    assert (min(19, before + 3), before) == (made_standing_back(3, nice), nice())


def test_where_it_is_forbidden_nothing_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes may refuse the system call: then all threads are alike."""

    def refused(which: int, who: int, priority: int) -> None:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "setpriority", refused)
    stand_back(5)
    assert nice() == made_standing_back(5, nice)
