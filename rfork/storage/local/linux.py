"""Linux system calls that report cached pages, memory pages and alignment, to find the fastest way to read.

They return None if the kernel is too old, or refuses this user.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys
from typing import NamedTuple

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
