"""Memory that a benchmark keeps allocated between runs, so that none pays for memory that was returned to the host."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

import numpy as np

MEMINFO: Final = Path("/proc/meminfo")
SPARE: Final = 1 << 30


class MemoryReserve:
    """Memory that is allocated and written to between runs, and freed right before each.

    A virtual machine may return free memory to its host within seconds, and get it back page by page when it
    is written to, at a tenth of the speed of memory and less. Memory that was just freed has not been
    returned yet, so the next run does not pay for it.
    """

    def __init__(self) -> None:
        self._area: mmap.mmap | None = None

    def acquire(self, size: int) -> int:
        """Allocate `size` bytes, or what is free except for a GiB, so that the page cache loses nothing."""
        self.release()
        size = min(size, memory_field(MEMINFO, "MemFree") - SPARE)
        if size <= 0:
            return 0
        self._area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._area.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(self._area, dtype=np.uint8)[:: mmap.PAGESIZE] = 1
        return size

    def release(self) -> None:
        """Free the memory."""
        if self._area is not None:
            self._area.close()
            self._area = None


def memory_field(path: Path, name: str) -> int:
    """Return the bytes that a file of /proc reports in the line `name`. Raises KeyError if there is none."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)
