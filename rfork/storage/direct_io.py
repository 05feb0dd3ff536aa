"""Reads local files at disk speed: cached data from the page cache, everything else past it.

The decision is made for each read. Cached ranges are copied from the page cache. The rest is read with
O_DIRECT: directly into the destination if that is one run of huge pages with the same alignment as the file;
otherwise into staging in huge pages, and copied from there.

Whether O_DIRECT is faster than the page cache depends on the disk, so with ``RFORK_STORAGE_DIRECT_IO=auto``
it is measured once per device and process: of the uncached data, one block in every `SAMPLE_INTERVAL_BYTES`
bytes is read through the page cache, and after `SAMPLES` of them the faster mode is kept
(`ReadModeSelector`). Samples are few, because in a virtual machine new page-cache pages may first have to be
allocated by the host, which can be several times slower than the disk. Conversely, a disk that is faster
through the page cache loses only on the first half gigabyte of a process.

The system calls that report cached pages, memory pages and alignment return None if the kernel is too old, or
refuses this user.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from statistics import median
from typing import Literal, NamedTuple

from rfork.image.host_memory import copy_block, host_view
from rfork.image.staging import BUFFER_ALIGNMENT, BufferPool
from rfork.logs import logger

MAX_IOVECS = 1024
"""Maximum number of buffers in one call: IOV_MAX of Linux and macOS."""
CACHESTAT = 451
"""System call number, the same on every architecture; since Linux 6.5."""
PAGEMAP_SCAN = 0xC0606610
"""ioctl of /proc/self/pagemap; since Linux 6.7."""
PAGE_IS_PRESENT, PAGE_IS_HUGE = 1 << 3, 1 << 6
SCAN, REGION = struct.Struct("12Q"), struct.Struct("3Q")
MAX_PAGEMAP_REGIONS = 16
"""Memory with more regions than this is not a run of huge pages."""
MADV_POPULATE_WRITE = 23
"""Since Linux 5.14."""
STATX_DIOALIGN = 0x2000
"""Since Linux 6.1."""
STATX = struct.Struct("I148xII96x")
"""A `struct statx`: its mask, and the alignment of memory and offsets."""
AT_EMPTY_PATH = 0x1000

_libc = ctypes.CDLL(None, use_errno=True)

log = logger(__name__)
DirectIoMode = Literal["auto", "always", "never"]
ReadMode = Literal["direct", "cached"]
MIN_DIRECT_BYTES = 1 << 20
"""Minimum size of reads for which checking the page cache pays off."""
MIN_ALIGNED_BYTES = 2 << 20
"""Minimum size of reads for which avoiding the copy through staging pays off."""
SAMPLES = 3
"""Blocks that are read through the page cache before a mode is chosen."""
FIRST_SAMPLE_BYTES, SAMPLE_INTERVAL_BYTES = 64 << 20, 256 << 20
"""Bytes read directly before the first of these blocks, and between two of them."""
MAX_CACHED_TIME_RATIO = 0.9
"""Cached reads are chosen only if they take less than this fraction of the time with O_DIRECT: they cost more
CPU and evict other data from the cache.
"""
UNSUPPORTED_ERRNOS = (errno.EINVAL, errno.ENOTSUP, errno.EFAULT)
"""Errors of file systems and memory that do not support O_DIRECT."""


class PageStats(NamedTuple):
    """Bytes of a memory range that are backed by pages, and by huge pages."""

    present: int
    huge: int


def resident(descriptor: int, offset: int, length: int) -> int | None:
    """Return the bytes of a file's range, rounded to pages, that are in the page cache."""
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = offset + length - first
    cachestat = (ctypes.c_uint64 * 5)()  # cached, dirty, written back, evicted, recently evicted
    wanted = (ctypes.c_uint64 * 2)(first, length)
    if sys.platform != "linux":
        return None
    if _libc.syscall(CACHESTAT, descriptor, wanted, cachestat, 0) == 0:
        return int(cachestat[0]) * mmap.PAGESIZE
    if ctypes.get_errno() != errno.ENOSYS:
        return None  # not this user's file: mincore would report it as completely cached
    return resident_when_mapped(descriptor, first, length)


def resident_when_mapped(descriptor: int, first: int, length: int) -> int | None:
    """Like `resident`, but with mincore and from the beginning of a page: for Linux before 6.5."""
    length = min(length, os.fstat(descriptor).st_size - first)
    if length <= 0:
        return 0
    try:
        mapping = mmap.mmap(descriptor, length, mmap.MAP_PRIVATE, offset=first)
    except OSError:
        return None
    with mapping:
        # No byte is accessed, so a file that is truncated meanwhile does no harm.
        start = ctypes.c_char.from_buffer(mapping)
        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        failed = _libc.mincore(ctypes.byref(start), ctypes.c_size_t(length), pages)
        del start
    return None if failed else sum(page & 1 for page in pages) * mmap.PAGESIZE


def direct_alignment(descriptor: int) -> int | None:
    """Return the required alignment of direct reads; 0 if they are not supported."""
    statx_buffer = ctypes.create_string_buffer(STATX.size)
    try:
        status = _libc.statx(descriptor, b"", AT_EMPTY_PATH, STATX_DIOALIGN, statx_buffer)
    except AttributeError:
        return None
    mask, memory, offset = STATX.unpack(statx_buffer.raw)
    if status != 0 or not mask & STATX_DIOALIGN:
        return None
    return max(memory, offset) if memory and offset else 0


def page_stats(address: int, length: int) -> PageStats | None:
    """Return the page statistics of this memory, rounded to pages."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(address + length) // mmap.PAGESIZE) * mmap.PAGESIZE
    regions = ctypes.create_string_buffer(REGION.size * MAX_PAGEMAP_REGIONS)
    categories = PAGE_IS_PRESENT | PAGE_IS_HUGE
    scan_argument = bytearray(
        SCAN.pack(
            SCAN.size,
            0,
            begin,
            end,
            0,
            ctypes.addressof(regions),
            MAX_PAGEMAP_REGIONS,
            0,
            0,
            0,
            categories,
            categories,
        )
    )
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            count = fcntl.ioctl(pagemap, PAGEMAP_SCAN, scan_argument)
    except OSError:
        return None
    present = huge = 0
    for start, stop, category in REGION.iter_unpack(regions.raw[: count * REGION.size]):
        present += stop - start
        huge += stop - start if category & PAGE_IS_HUGE else 0
    return PageStats(present, huge)


def populate(address: int, length: int) -> bool:
    """Allocate the pages of this memory now, as writing to it would; return whether that succeeded."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    byte_length = ctypes.c_size_t(address + length - begin)
    return bool(_libc.madvise(ctypes.c_void_p(begin), byte_length, MADV_POPULATE_WRITE) == 0)


def address_of(view: memoryview) -> int:
    """Return the address of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class EndOfFile(Exception):
    """The file ends before the requested bytes."""


class ReadModeSelector:
    """Chooses the faster read mode for one device. Thread-safe."""

    def __init__(self) -> None:
        self.chosen: ReadMode | None = None
        self._lock = threading.Lock()
        self._assigned_bytes = 0
        self._samples = 0
        self._seconds_per_byte: dict[ReadMode, list[float]] = {"direct": [], "cached": []}

    def next(self, length: int) -> ReadMode:
        """Return the read mode for the next block of `length` bytes."""
        with self._lock:
            if self.chosen is not None:
                return self.chosen
            self._assigned_bytes += length
            if (
                self._samples == SAMPLES
                or self._assigned_bytes <= FIRST_SAMPLE_BYTES + self._samples * SAMPLE_INTERVAL_BYTES
            ):
                return "direct"  # until the next sample is due, or the last one is recorded
            self._samples += 1
            return "cached"

    def record(self, mode: ReadMode, seconds_per_byte: float) -> None:
        """Record the duration of a block's read."""
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
                log.debug(
                    "read mode of uncached data selected",
                    mode=self.chosen,
                    cached_gb_s=1e-9 / cached,
                    direct_gb_s=1e-9 / direct,
                )


@cache
def selector_for_device(device: int) -> ReadModeSelector:
    """Return this process's selector for a device (`st_dev`)."""
    return ReadModeSelector()


class DirectFile:
    """Reads of one open file. Thread-safe. The caller owns the descriptor and closes it after `close`."""

    def __init__(self, descriptor: int, direct: DirectIoMode, staging: BufferPool) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._staging = staging
        self._mode_selector = selector_for_device(os.fstat(descriptor).st_dev)
        self._lock = threading.Lock()
        self._direct_fd: _DirectFd | None = None
        self._possible = direct != "never" and hasattr(os, "O_DIRECT")

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views with the bytes from `offset`. Raises OSError or EndOfFile."""
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
        direct_fd = self._open_direct() if mode == "direct" else None
        began = time.perf_counter()
        if direct_fd is None or not self._read_direct(direct_fd, offset, length, views):
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)
            read_cached(self._descriptor, offset, views)
            mode = "cached"
        if measured:
            self._mode_selector.record(mode, (time.perf_counter() - began) / length)

    def cached(self, offset: int, length: int) -> bool:
        """Return True if at least half of a range is known to be in the page cache."""
        return 2 * (resident(self._descriptor, offset, length) or 0) >= length

    def close(self) -> None:
        """Close additional descriptors. Call only when no read is in progress."""
        if self._direct_fd is not None:
            os.close(self._direct_fd.descriptor)

    def _open_direct(self) -> _DirectFd | None:
        with self._lock:
            if self._direct_fd is None and self._possible:
                alignment = direct_alignment(self._descriptor)
                # Open by descriptor: the name may refer to another file by now.
                name = f"/proc/self/fd/{self._descriptor}"
                with suppress(OSError):
                    if alignment != 0:
                        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                        self._direct_fd = _DirectFd(descriptor, alignment or BUFFER_ALIGNMENT)
                self._possible = self._direct_fd is not None
            return self._direct_fd

    def _read_direct(self, direct_fd: _DirectFd, offset: int, length: int, views: Sequence[memoryview]) -> bool:
        """Read past the page cache; return False if that is not supported."""
        try:
            if len(views) == 1 and length >= MIN_ALIGNED_BYTES and _is_direct_readable(direct_fd, offset, views[0]):
                self._read_aligned(direct_fd, offset, views[0])
            else:
                self._read_staged(direct_fd, offset, length, views)
        except OSError as error:
            if error.errno not in UNSUPPORTED_ERRNOS:
                raise
            self._possible = False
            log.debug("direct reads not supported", reason=error.strerror)
            return False
        return True

    def _read_aligned(self, direct_fd: _DirectFd, offset: int, view: memoryview) -> None:
        first = -offset % direct_fd.alignment
        last = first + (view.nbytes - first) // direct_fd.alignment * direct_fd.alignment
        read_cached(direct_fd.descriptor, offset + first, [view[first:last]])
        for begin, end in ((0, first), (last, view.nbytes)):
            if begin < end:
                self._read_staged(direct_fd, offset + begin, end - begin, [view[begin:end]])

    def _read_staged(self, direct_fd: _DirectFd, offset: int, length: int, views: Sequence[memoryview]) -> None:
        end, rest = offset + length, _RemainingViews(views)
        with self._staging.lease() as buffer:
            memory = host_view(buffer.data_ptr(), buffer.numel())
            while offset < end:
                first = offset // direct_fd.alignment * direct_fd.alignment
                wanted = min(-(-(end - first) // direct_fd.alignment) * direct_fd.alignment, memory.nbytes)
                there = _read_some(direct_fd, first, memory[:wanted], min(end - first, wanted))
                rest.fill(memory[offset - first : there])
                offset = first + there


class _DirectFd(NamedTuple):
    """A descriptor opened with O_DIRECT, and the required alignment of addresses, offsets and lengths."""

    descriptor: int
    alignment: int


class _RemainingViews:
    """Views that are filled from the front."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._left = list(views[::-1])

    def fill(self, block: memoryview) -> None:
        """Copy the next bytes."""
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
    """Fill the views with plain reads. Raises OSError or EndOfFile."""
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


def _read_some(direct_fd: _DirectFd, offset: int, memory: memoryview, min_bytes: int) -> int:
    """Read at least `min_bytes` bytes, and fewer than `memory` only at the end of the file; return the number
    read.
    """
    there = 0
    while there < min_bytes:
        count = os.preadv(direct_fd.descriptor, [memory[there:]], offset + there)
        if count == 0 or (there + count < min_bytes and count % direct_fd.alignment):
            raise EndOfFile
        there += count
    return min(there, min_bytes)


def _is_direct_readable(direct_fd: _DirectFd, offset: int, view: memoryview) -> bool:
    """Return True if a view has the file's alignment and is (or can be) backed by huge pages."""
    address = address_of(view)
    if (address - offset) % direct_fd.alignment:
        return False
    pages = page_stats(address, view.nbytes)
    # Pages that are present may belong to neighbours: blocks share the huge pages at their ends.
    lacking = pages is not None and pages.present == pages.huge < view.nbytes
    if lacking and populate(address, view.nbytes):
        pages = page_stats(address, view.nbytes)
    return pages is not None and pages.huge >= view.nbytes * 7 // 8
