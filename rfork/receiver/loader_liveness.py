"""Detects whether an opaque loader still makes progress. Runs on the target.

A loader reports nothing, so progress is inferred from the CPU time of its thread and from the bytes that its
process has read.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

MIN_CPU_S = 0.001
MIN_BYTES = 64 << 10
IO = Path("/proc/self/io")
"""Linux: bytes that this process has read, by system calls (rchar) and from disks, also through maps
(read_bytes).
"""


class LoaderLiveness:
    """Watches the thread that creates it.

    A loader that hangs in a read, or waits for one, uses no CPU time and reads nothing. `last_activity` may be
    called from any thread while the watched one is alive.
    """

    def __init__(self) -> None:
        # Without a clock per thread, use that of the process: too lenient to a loader rather than too strict.
        own = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if own else time.CLOCK_PROCESS_CPUTIME_ID
        self._lock = threading.Lock()
        self._cpu_s = time.clock_gettime(self._clock)
        self._read = _bytes_read()
        self._at = time.monotonic()

    def last_activity(self) -> float:
        """Return when it last made progress, as a `time.monotonic()` value."""
        with self._lock:
            cpu_s, read = time.clock_gettime(self._clock), _bytes_read()
            if cpu_s - self._cpu_s >= MIN_CPU_S or read - self._read >= MIN_BYTES:
                self._cpu_s, self._read, self._at = cpu_s, read, time.monotonic()
            return self._at


def _bytes_read() -> int:
    try:
        lines = IO.read_text().splitlines()
    except OSError:  # not on Linux, or not readable: the CPU time alone decides
        return 0
    counts = dict(line.split(": ", 1) for line in lines)
    return int(counts.get("rchar", 0)) + int(counts.get("read_bytes", 0))
