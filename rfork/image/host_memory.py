"""Host memory by address: views of it, and advice to the kernel about it."""

from __future__ import annotations

import ctypes
import sys

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14
PYBUF_WRITE = 0x200

_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.restype = ctypes.py_object
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def host_view(address: int, length: int) -> memoryview:
    """A writable view (format 'B') of `length` bytes; valid only as long as that memory is."""
    view: memoryview = _view_of_memory(address, length, PYBUF_WRITE)
    return view


def advise_huge_pages(address: int, length: int) -> int:
    """Ask Linux to back the whole 2 MiB pages within this memory by huge pages; the bytes it agreed to.

    Best effort: 0 on other systems, and where the kernel has no transparent huge pages.
    """
    if not sys.platform.startswith("linux"):
        return 0
    begin = -(-address // HUGE_PAGE) * HUGE_PAGE
    whole = (address + length) // HUGE_PAGE * HUGE_PAGE - begin
    if whole <= 0:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return whole if madvise(begin, whole, MADV_HUGEPAGE) == 0 else 0
