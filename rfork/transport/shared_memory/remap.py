"""Replaces pages of this process by pages of a file, copy-on-write, with mmap and mremap. Runs on the target."""

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
    """System calls through the C library. Linux only."""

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
        """Atomically replace the pages at `address` by a private mapping of the file from `offset` on.

        All pages are populated when this returns, so no page faults occur later (except before Linux 5.14).
        Raises OSError; the memory is then unchanged or, if the kernel failed halfway, zeroed.
        """
        mapped = self._mmap(None, length, _READ_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE, descriptor, offset)
        if mapped == _FAILED:
            raise _error("mmap")
        try:
            if self._madvise(mapped, length, MADV_POPULATE_READ):
                error = _error("madvise")
                if error.errno != errno.EINVAL:  # not supported by this kernel
                    raise error
            moved = self._mremap(mapped, length, length, _MREMAP_MAYMOVE | _MREMAP_FIXED, address)
            if moved == _FAILED:
                error = _error("mremap")
                self._restore(address, length)
                raise error
        except OSError:
            self._munmap(mapped, length)
            raise

    def equal(self, view: memoryview, other: memoryview) -> bool:
        """Return True if two views of one length have the same bytes. Releases the GIL."""
        return bool(self._compare(_address(view), _address(other), view.nbytes) == 0)

    def _restore(self, address: int, length: int) -> None:
        """Map memory again after a failed move, which may have removed the old pages."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        # Has no effect if the old pages still exist.
        self._mmap(address, length, _READ_WRITE, flags, -1, 0)


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
