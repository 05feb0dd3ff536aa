"""Local files at the speed of their disk: from the page cache what is in it, past it what is not.

Each read is looked at by itself. What the page cache holds is copied from there. The rest is read by
O_DIRECT: straight into the destination where that is one run of huge pages, aligned like the file; else
into staging in huge pages, and copied from there.

Whether O_DIRECT is quicker than reading through the page cache depends on the disk, so with
``RFORK_STORAGE_DIRECT_IO=auto`` it is measured, once for each device and process: of what is not cached, one
block in `EVERY` bytes is read through the page cache, and after `SAMPLES` of them the quicker way is kept
(`ReadModeSelector`). Few, because the page cache may take its new pages from a host that has to find them first, and
be several times slower than the disk; the other way round, a disk that is quicker through the page cache
loses only on the first half gigabyte of a process.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from statistics import median
from typing import Literal, NamedTuple

from rfork.image.host_memory import copy_block, host_view
from rfork.logs import logger
from rfork.storage.io.staging import BUFFER_ALIGNMENT, BufferPool
from rfork.storage.local import linux
from rfork.storage.local.linux import MAX_IOVECS

log = logger(__name__)

Direct = Literal["auto", "always", "never"]
ReadMode = Literal["direct", "cached"]

MIN_DIRECT_BYTES = 1 << 20
"""Bytes under which a read is not worth a look at the page cache."""
MIN_ALIGNED_BYTES = 2 << 20
"""Bytes under which a copy costs less than finding out whether it can be saved."""
SAMPLES = 3
"""Blocks that are read through the page cache before a way is chosen."""
FIRST, EVERY = 64 << 20, 256 << 20
"""Bytes that are read past the page cache before the first of these blocks, and from one to the next."""
MAX_CACHED_TIME_RATIO = 0.9
"""The share of O_DIRECT's time that reads through the page cache must stay below to be chosen: they cost
the processor more, and drive out what others have cached."""
UNSUPPORTED_ERRNOS = (errno.EINVAL, errno.ENOTSUP, errno.EFAULT)
"""What file systems and memory that cannot do O_DIRECT answer."""


class EndOfFile(Exception):
    """The file ends before the bytes that were asked for."""


class ReadModeSelector:
    """Which way the blocks of one device are read quicker. Thread-safe."""

    def __init__(self) -> None:
        self.chosen: ReadMode | None = None
        self._lock = threading.Lock()
        self._handed = 0
        self._samples = 0
        self._seconds_per_byte: dict[ReadMode, list[float]] = {"direct": [], "cached": []}

    def next(self, length: int) -> ReadMode:
        """How to read the next block, which has so many bytes."""
        with self._lock:
            if self.chosen is not None:
                return self.chosen
            self._handed += length
            if self._samples == SAMPLES or self._handed <= FIRST + self._samples * EVERY:
                return "direct"  # until the next sample is due, or the last is in
            self._samples += 1
            return "cached"

    def record(self, mode: ReadMode, seconds_per_byte: float) -> None:
        """Tell how long a block took."""
        with self._lock:
            if self.chosen is not None:
                return
            self._seconds_per_byte[mode].append(seconds_per_byte)
            if len(self._seconds_per_byte["cached"]) >= SAMPLES and self._seconds_per_byte["direct"]:
                cached, direct = (
                    median(self._seconds_per_byte["cached"]),
                    median(self._seconds_per_byte["direct"]),
                )
                self.chosen = "cached" if cached < MAX_CACHED_TIME_RATIO * direct else "direct"
                log.debug("cold reads", way=self.chosen, cached_gb_s=1e-9 / cached, direct_gb_s=1e-9 / direct)


@cache
def selector_for_device(device: int) -> ReadModeSelector:
    """What is known of a device (`st_dev`) in this process."""
    return ReadModeSelector()


class DirectFile:
    """Reads of one open file; thread-safe. Whoever opened the descriptor closes it, after `close`."""

    def __init__(self, descriptor: int, direct: Direct, staging: BufferPool) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._staging = staging
        self._mode_selector = selector_for_device(os.fstat(descriptor).st_dev)
        self._lock = threading.Lock()
        self._direct_fd: _DirectFd | None = None
        self._possible = direct != "never" and hasattr(os, "O_DIRECT")

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views with the bytes from `offset` on. Raises OSError, or Ended."""
        views = [view for view in into if view.nbytes]
        length = sum(view.nbytes for view in views)
        if not self._possible or (length < MIN_DIRECT_BYTES and self._direct != "always"):
            read_cached(self._descriptor, offset, views)
            return
        measured = self._direct == "auto"
        if measured and self.cached(offset, length):
            read_cached(self._descriptor, offset, views)
            return
        mode = self._mode_selector.next(length) if measured else "direct"
        past = self._opened() if mode == "direct" else None
        began = time.perf_counter()
        if past is None or not self._read_direct(past, offset, length, views):
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)
            read_cached(self._descriptor, offset, views)
            mode = "cached"
        if measured:
            self._mode_selector.record(mode, (time.perf_counter() - began) / length)

    def cached(self, offset: int, length: int) -> bool:
        """Whether most of a range is known to be in the page cache."""
        return 2 * (linux.resident(self._descriptor, offset, length) or 0) >= length

    def close(self) -> None:
        """Close what was opened beside the descriptor; no read is under way any more."""
        if self._direct_fd is not None:
            os.close(self._direct_fd.descriptor)

    def _opened(self) -> _DirectFd | None:
        with self._lock:
            if self._direct_fd is None and self._possible:
                alignment = linux.direct_alignment(self._descriptor)
                # Through the descriptor: the name may be another file's by now.
                name = f"/proc/self/fd/{self._descriptor}"
                with suppress(OSError):
                    if alignment != 0:
                        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                        self._direct_fd = _DirectFd(descriptor, alignment or BUFFER_ALIGNMENT)
                self._possible = self._direct_fd is not None
            return self._direct_fd

    def _read_direct(self, past: _DirectFd, offset: int, length: int, views: Sequence[memoryview]) -> bool:
        """Read past the page cache; False where that is not possible after all."""
        try:
            if len(views) == 1 and length >= MIN_ALIGNED_BYTES and _straight(past, offset, views[0]):
                self._read_aligned(past, offset, views[0])
            else:
                self._read_staged(past, offset, length, views)
        except OSError as error:
            if error.errno not in UNSUPPORTED_ERRNOS:
                raise
            self._possible = False
            log.debug("no direct reads", because=error.strerror)
            return False
        return True

    def _read_aligned(self, past: _DirectFd, offset: int, view: memoryview) -> None:
        first = -offset % past.alignment
        last = first + (view.nbytes - first) // past.alignment * past.alignment
        read_cached(past.descriptor, offset + first, [view[first:last]])
        for begin, end in ((0, first), (last, view.nbytes)):
            if begin < end:
                self._read_staged(past, offset + begin, end - begin, [view[begin:end]])

    def _read_staged(self, past: _DirectFd, offset: int, length: int, views: Sequence[memoryview]) -> None:
        end, rest = offset + length, _RemainingViews(views)
        with self._staging.lease() as buffer:
            memory = host_view(buffer.data_ptr(), buffer.numel())
            while offset < end:
                first = offset // past.alignment * past.alignment
                wanted = min(-(-(end - first) // past.alignment) * past.alignment, memory.nbytes)
                there = _read_some(past, first, memory[:wanted], min(end - first, wanted))
                rest.fill(memory[offset - first : there])
                offset = first + there


class _DirectFd(NamedTuple):
    """A descriptor opened with O_DIRECT, and what addresses, offsets and lengths must be multiples of."""

    descriptor: int
    alignment: int


class _RemainingViews:
    """Views that are filled from their front on."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._left = list(views[::-1])

    def fill(self, block: memoryview) -> None:
        """Put the next bytes."""
        remaining, views = block.nbytes, []
        while remaining:
            view = self._left.pop()
            if view.nbytes > remaining:
                self._left.append(view[remaining:])
                view = view[:remaining]
            remaining -= view.nbytes
            views.append(view)
        copy_block(block, views)


def read_cached(descriptor: int, offset: int, views: Sequence[memoryview]) -> None:
    """Fill the views by plain reads. Raises OSError, or Ended."""
    first = 0
    while first < len(views):
        some = views[first : first + MAX_IOVECS]
        count = os.preadv(descriptor, some, offset)
        if count == 0:
            raise EndOfFile
        offset += count
        if count == sum(view.nbytes for view in some):
            first += len(some)
            continue
        left = []
        for view in some:
            if count < view.nbytes:
                left.append(view[count:])
            count = max(0, count - view.nbytes)
        views, first = [*left, *views[first + len(some) :]], 0


def _read_some(past: _DirectFd, offset: int, memory: memoryview, min_bytes: int) -> int:
    """Read at least so many bytes of a file, fewer than `memory` only at its end; how many came."""
    there = 0
    while there < min_bytes:
        count = os.preadv(past.descriptor, [memory[there:]], offset + there)
        if count == 0 or (there + count < min_bytes and count % past.alignment):
            raise EndOfFile
        there += count
    return min(there, min_bytes)


def _straight(past: _DirectFd, offset: int, view: memoryview) -> bool:
    """Whether a view is aligned like the file, and in huge pages, once something is behind it."""
    address = linux.address_of(view)
    if (address - offset) % past.alignment:
        return False
    pages = linux.page_stats(address, view.nbytes)
    # What is there may be a neighbour's: blocks share the huge pages at their ends.
    lacking = pages is not None and pages.present == pages.huge < view.nbytes
    if lacking and linux.populate(address, view.nbytes):
        pages = linux.page_stats(address, view.nbytes)
    return pages is not None and pages.huge >= view.nbytes * 7 // 8
