"""Threads with a lowered priority, where the system permits it."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rfork.thread_priority import lower_thread_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness applies to the process here")


def thread_niceness() -> int:
    """Return the niceness of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def lowered_niceness(increment: int) -> int:
    """Return the niceness of a new thread with a lowered priority."""
    with ThreadPoolExecutor(1, initializer=lower_thread_priority, initargs=(increment,)) as threads:
        return threads.submit(thread_niceness).result()


def test_only_the_calling_thread_has_a_lowered_priority() -> None:
    """The thread that started it keeps its niceness."""
    before = thread_niceness()
    assert min(19, before + 3) == lowered_niceness(3)
    assert before == thread_niceness()


def test_a_forbidden_system_call_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes may refuse the system call: then all threads have the same priority."""

    def deny_setpriority(target_type: int, target_id: int, priority: int) -> None:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "setpriority", deny_setpriority)
    assert thread_niceness() == lowered_niceness(5)
