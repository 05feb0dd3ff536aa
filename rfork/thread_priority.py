"""Threads that stand back: the scheduler prefers the rest of the process to them."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

from rfork.logs import logger

log = logger(__name__)

SERVING_THREAD_NICE: Final = 5
"""Niceness of the threads that serve readers, so that the engine has precedence; measured below."""


def lower_thread_priority(nice: int) -> None:
    """Make the calling thread, and those it starts from now on, nicer by `nice` (0 to 19).

    A core that nothing else wants is theirs as before. On a busy one, a thread that is far nicer than the
    others is descheduled for long while it holds the interpreter's lock, and so holds up the threads that
    serve. Measured with a third party on the core: with 5 the 99th percentile of their steps was no worse
    than with 0, with 10 worse, with 19 three times as long. On Linux a niceness is a thread's own;
    elsewhere it is the process's, and nothing is done; nor where a sandbox forbids it.
    """
    if nice > 0 and sys.platform == "linux":
        thread = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + nice))
        except OSError as error:
            log.debug("a thread cannot stand back", reason=str(error))
