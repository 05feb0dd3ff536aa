"""Pages of a file put in place of this process's own, copy on write: mmap and mremap. Runs on the target."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Final

MADV_POPULATE_READ: Final = 22
_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MAP_NORESERVE: Final = 0x4000
_MAP_FIXED_NOREPLACE: Final = 0x100000
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED: Final = ctypes.c_void_p(-1).value


class PageRemapper:
    """The system calls, by the C library. Linux only."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._mmap, self._munmap = library.mmap, library.munmap
        self._mremap, self._madvise = library.mremap, library.madvise
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._mmap.restype = self._mremap.restype = address
        self._mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
        self._munmap.argtypes = (address, size)
        self._mremap.argtypes = (address, size, size, number, address)
        self._madvise.argtypes = (address, size, number)
        self._compare = library.memcmp
        self._compare.argtypes = (address, address, size)

    def replace(self, address: int, length: int, descriptor: int, offset: int) -> None:
        """Have the whole pages at `address` show the file from `offset` on, privately, from one moment on.

        All pages are there when this returns: no fault costs time later (but before Linux 5.14, where the
        first touch of each page does). Raises OSError, with the memory as it was or, where the kernel gave up
        half way, with pages of zeros.
        """
        made = self._mmap(None, length, _READ_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE, descriptor, offset)
        if made == _FAILED:
            raise _error("mmap")
        try:
            if self._madvise(made, length, MADV_POPULATE_READ):
                error = _error("madvise")
                if error.errno != errno.EINVAL:  # a kernel that does not know it
                    raise error
            moved = self._mremap(made, length, length, _MREMAP_MAYMOVE | _MREMAP_FIXED, address)
            if moved == _FAILED:
                error = _error("mremap")
                self._restore(address, length)
                raise error
        except OSError:
            self._munmap(made, length)
            raise

    def equal(self, view: memoryview, other: memoryview) -> bool:
        """Whether two views of one length hold the same bytes; others may run Python meanwhile."""
        return bool(self._compare(_address(view), _address(other), view.nbytes) == 0)

    def _restore(self, address: int, length: int) -> None:
        """After a move that failed the old pages may be gone: have memory there again, in any case."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        # Does nothing where the old pages are still there.
        self._mmap(address, length, _READ_WRITE, flags, -1, 0)


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
