"""Threads that stand back, where they may and where they may not."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rfork.thread_priority import lower_thread_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a niceness is the process's here")


def thread_niceness() -> int:
    """The calling thread's."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def lowered_niceness(increment: int) -> int:
    """The niceness of a new thread that stands back."""
    with ThreadPoolExecutor(1, initializer=lower_thread_priority, initargs=(increment,)) as threads:
        return threads.submit(thread_niceness).result()


def test_only_the_thread_that_stands_back_is_nicer() -> None:
    """Whoever started it goes on as before."""
    before = thread_niceness()
    assert (min(19, before + 3), before) == (lowered_niceness(3), thread_niceness())


def test_where_it_is_forbidden_nothing_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes may refuse the system call: then all threads are alike."""

    def deny_setpriority(target_type: int, target_id: int, priority: int) -> None:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "setpriority", deny_setpriority)
    assert thread_niceness() == lowered_niceness(5)
