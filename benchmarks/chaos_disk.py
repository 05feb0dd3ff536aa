"""Disks of `benchmarks.chaos`: one that is as slow as a link, one that is full, one that loses its end.

`rate_limited_reads` runs in a node; the rest in the process that runs the rounds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rfork.storage.local.files import LocalFile

BLOCK: Final = 1 << 20
FILLER: Final = "filler"


class _RateLimiter:
    """Spreads reads over time, whoever reads."""

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
    """Have this process read files by position at `rate` bytes a second in all; 0: as fast as it can.

    Cold starts of a lab would otherwise be over before anything can happen to them.
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
    """Write until the disk that `folder` is on has no byte left."""
    block = bytes(BLOCK)
    with (folder / FILLER).open("wb", buffering=0) as file:
        for size in (BLOCK, 4096):
            with contextlib.suppress(OSError):
                while os.write(file.fileno(), block[:size]) == size:
                    pass


def clear(folder: Path) -> None:
    """Remove all files in `folder`, which has no folders."""
    for path in list(folder.rglob("*")):
        if path.is_file():
            path.unlink()


def truncate(path: Path) -> None:
    """Cut a file in half, as when the disk or the volume under a reader loses its end."""
    os.truncate(path, path.stat().st_size // 2)
