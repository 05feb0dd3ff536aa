"""Views of host memory by address, how the C library allocates it, and memory advice to the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator, Sequence
from typing import Final

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14
PYBUF_WRITE = 0x200
SMALL_COPY_BYTES = 64 << 10
"""Size below which a plain copy is fastest. Larger copies release the interpreter lock."""
MIN_MAPPED_BYTES: Final = 64 << 10
"""Smaller allocations never get a mapping of their own: it would cost the kernel more, for as long as it exists."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MAX_MMAP_THRESHOLD: Final = 32 << 20
"""Maximum threshold of glibc's own adjustment, which ends once a threshold is set."""

_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.restype = ctypes.py_object
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def host_view(address: int, length: int) -> memoryview:
    """Return a writable view (format 'B') of `length` bytes, valid only while that memory exists."""
    view: memoryview = _view_of_memory(address, length, PYBUF_WRITE)
    return view


def copy_block(block: memoryview, views: Sequence[memoryview]) -> None:
    """Copy a writable block into views, in order. Raises ValueError if the block is smaller than the views."""
    at = 0
    for view in views:
        part = block[at : at + view.nbytes]
        at += view.nbytes
        if part.nbytes < view.nbytes:
            raise ValueError(f"a block of {block.nbytes} bytes is too short for its views")
        if view.nbytes < SMALL_COPY_BYTES:
            view[:] = part
        else:
            ctypes.memmove(_address(view), _address(part), part.nbytes)


@contextlib.contextmanager
def separate_mappings() -> Iterator[None]:
    """Place each large allocation within the block in a mapping of its own, whose pages a file's can replace.

    glibc does so from 128 KiB on in a new process, but raises that limit up to 32 MiB as large allocations are freed:
    in an engine, most weights would lie in the heap and have to be copied. A free block of the heap is still used
    first if it is large enough. Afterwards the limit is 32 MiB. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, MIN_MAPPED_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2 * _MAX_MMAP_THRESHOLD)  # as glibc sets it with the other


def advise_huge_pages(address: int, length: int) -> int:
    """Request huge pages for the complete 2 MiB pages in this memory. Return the number of bytes advised.

    Best effort: returns 0 on other systems, and if the kernel has no transparent huge pages.
    """
    if not sys.platform.startswith("linux"):
        return 0
    begin = -(-address // HUGE_PAGE) * HUGE_PAGE
    aligned_bytes = (address + length) // HUGE_PAGE * HUGE_PAGE - begin
    if aligned_bytes <= 0:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return aligned_bytes if madvise(begin, aligned_bytes, MADV_HUGEPAGE) == 0 else 0


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
