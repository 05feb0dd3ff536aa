"""Threads that stand back, where they may and where they may not."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rfork.niceness import stand_back

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a niceness is the process's here")


def nice() -> int:
    """The calling thread's."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def standing_back(by: int) -> int:
    """The niceness of a new thread that stands back."""
    with ThreadPoolExecutor(1, initializer=stand_back, initargs=(by,)) as threads:
        return threads.submit(nice).result()


def test_only_the_thread_that_stands_back_is_nicer() -> None:
    """Whoever started it goes on as before."""
    before = nice()
    assert (min(19, before + 3), before) == (standing_back(3), nice())


def test_where_it_is_forbidden_nothing_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes may refuse the system call: then all threads are alike."""

    def refused(which: int, who: int, priority: int) -> None:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "setpriority", refused)
    assert nice() == standing_back(5)
