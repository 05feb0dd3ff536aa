"""Lower scheduling priority for threads, so that the rest of the process has precedence."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

from rfork.logs import logger

log = logger(__name__)

SERVING_THREAD_NICE: Final = 5
"""Niceness of the threads that serve readers, so that the engine has priority; measured below."""


def lower_thread_priority(nice: int) -> None:
    """Raise the niceness of the calling thread, and of threads it starts later, by `nice` (0 to 19).

    It does not affect a thread on an idle core. On a busy core, a thread that is much nicer than others is
    descheduled for long while it owns the interpreter's lock, which delays serving threads. Measured with a
    third process on the core: with 5, p99 of their steps was no worse than with 0; with 10 worse; with 19
    three times as long. On Linux, niceness belongs to a thread; elsewhere to the process, and this function
    does nothing, as in sandboxes that forbid it.
    """
    if nice > 0 and sys.platform == "linux":
        thread = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + nice))
        except OSError as error:
            log.debug("failed to lower a thread's priority", reason=str(error))
