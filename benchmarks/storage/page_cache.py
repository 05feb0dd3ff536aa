"""Control of the page cache for `benchmarks.storage`: query, drop and fill it. Linux 6.5."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from rfork.errors import RforkError

CACHESTAT = 451
"""Number of the system call cachestat, on every architecture."""
PAGE = os.sysconf("SC_PAGE_SIZE")
BLOCK_BYTES = 16 << 20
ATTEMPTS = 5

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached_bytes(path: Path) -> int:
    """Return how many bytes of a file are in the page cache. Raises RforkError if the kernel cannot report
    it.
    """
    counts = _Counts()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # A length of 0 means to the end of the file.
        failed = _libc.syscall(
            CACHESTAT, descriptor, ctypes.byref(_Range(0, 0)), ctypes.byref(counts), ctypes.c_uint(0)
        )
    finally:
        os.close(descriptor)
    if failed:
        raise RforkError(f"cannot query the page cache: {os.strerror(ctypes.get_errno())}")
    return int(counts.cached) * PAGE


def make_cold(paths: Iterable[Path]) -> None:
    """Drop files from the page cache and check it. Raises RforkError if something remains."""
    for path in paths:
        for _ in range(ATTEMPTS):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
            if cached_bytes(path) == 0:
                break
        else:
            raise RforkError(f"{cached_bytes(path)} bytes of {path.name} remain in the page cache")


def make_warm(paths: Iterable[Path]) -> None:
    """Read files until they are completely in the page cache. Raises RforkError if they do not fit."""
    block = bytearray(BLOCK_BYTES)
    for path in paths:
        size = path.stat().st_size
        for _ in range(ATTEMPTS):
            if cached_bytes(path) >= size:
                break
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass
        else:
            raise RforkError(f"{path.name} does not stay in the page cache: too little free memory")
