"""Disk faults of `benchmarks.chaos`: a disk as slow as a link, a full disk, a truncated file.

`rate_limited_reads` runs in a node; the rest runs in the process that runs the rounds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rfork.storage.local import LocalFile

BLOCK: Final = 1 << 20
FILLER: Final = "filler"


class _RateLimiter:
    """Rate limiter for the reads of all threads together."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def wait(self, nbytes: int) -> None:
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + nbytes / self._rate
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


@contextlib.contextmanager
def rate_limited_reads(rate: int) -> Iterator[None]:
    """Limit this process's positional file reads to `rate` bytes per second in total; 0 means unlimited.

    Without it a cold start would finish before a fault can be injected.
    """
    if not rate:
        yield
        return
    limiter, read = _RateLimiter(rate), LocalFile.read

    def slowly(self: LocalFile, offset: int, into: Sequence[memoryview]) -> None:
        limiter.wait(sum(view.nbytes for view in into))
        read(self, offset, into)

    LocalFile.read = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalFile.read = read  # type: ignore[method-assign]


def fill(folder: Path) -> None:
    """Fill the disk of `folder` until no byte is left."""
    block = bytes(BLOCK)
    with (folder / FILLER).open("wb", buffering=0) as file:
        for size in (BLOCK, 4096):
            with contextlib.suppress(OSError):
                while os.write(file.fileno(), block[:size]) == size:
                    pass


def clear(folder: Path) -> None:
    """Remove all files in `folder`, which has no subfolders."""
    for path in list(folder.rglob("*")):
        if path.is_file():
            path.unlink()


def truncate(path: Path) -> None:
    """Truncate a file to half its size, as if its disk or volume had lost the end."""
    os.truncate(path, path.stat().st_size // 2)
