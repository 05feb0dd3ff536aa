"""Whether a loader that says nothing of itself still does something. Runs on the target."""

from __future__ import annotations

import threading
import time
from pathlib import Path

MIN_CPU_S = 0.001
MIN_BYTES = 64 << 10
IO = Path("/proc/self/io")
"""Linux: what this process has read, by call (rchar) and from disks, also through maps (read_bytes)."""


class LoaderLiveness:
    """Looks at the thread that made it: at the CPU time it takes, and at what its process reads.

    A loader that hangs in a read, or waits for one that hangs, does neither. `last_activity` may be called on any
    thread while the first one lives.
    """

    def __init__(self) -> None:
        # Where a thread has no clock of its own, its process's: too kind to a loader, if anything.
        own = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if own else time.CLOCK_PROCESS_CPUTIME_ID
        self._lock = threading.Lock()
        self._cpu_s = time.clock_gettime(self._clock)
        self._read = _bytes_read()
        self._at = time.monotonic()

    def last_activity(self) -> float:
        """When it was last seen to do something, on `time.monotonic()`'s clock."""
        with self._lock:
            cpu_s, read = time.clock_gettime(self._clock), _bytes_read()
            if cpu_s - self._cpu_s >= MIN_CPU_S or read - self._read >= MIN_BYTES:
                self._cpu_s, self._read, self._at = cpu_s, read, time.monotonic()
            return self._at


def _bytes_read() -> int:
    try:
        lines = IO.read_text().splitlines()
    except OSError:  # not on Linux, or not to be read: the CPU time alone has to tell
        return 0
    counts = dict(line.split(": ", 1) for line in lines)
    return int(counts.get("rchar", 0)) + int(counts.get("read_bytes", 0))
