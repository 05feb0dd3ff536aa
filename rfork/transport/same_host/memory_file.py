"""Memory files, which one process of a host creates and others open by their descriptors. For both sides."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Final

from rfork.errors import SourceCorrupt, TargetError
from rfork.image.memory import Image

FILE_NAME: Final = "rfork-chunk"
"""Name of memory files in /proc/PID/maps."""
MAX_VIEWS: Final = 1024
"""Maximum views per system call (IOV_MAX)."""


class Descriptor:
    """An open file descriptor that is closed when this object is collected."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._finalizer = weakref.finalize(self, os.close, number)

    def empty(self) -> None:
        """Free the memory of an unsealed file, even if other processes have it open."""
        os.ftruncate(self.number, 0)


def memory_file(*, sealable: bool = True) -> Descriptor:
    """Create an empty memory file. A receiver cannot prevent one that is not `sealable` from being emptied.

    Raises OSError.
    """
    return Descriptor(os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealable else 0)))


def write(descriptor: int, file_offset: int, views: Sequence[memoryview]) -> None:
    """Write views to the file from byte `file_offset` on. Raises OSError."""
    _transfer(os.pwritev, descriptor, file_offset, views)


def read(descriptor: int, file_offset: int, views: Sequence[memoryview]) -> None:
    """Fill views from byte `file_offset` of the file on. Raises OSError, also at the end of the file."""
    _transfer(os.preadv, descriptor, file_offset, views)


def fill(image: Image, begin: int, end: int, descriptor: int, file_offset: int) -> None:
    """Fill image range `[begin, end)` of the target from a file of the source.

    Raises TargetError if the target's memory is not writable, and SourceCorrupt.
    """
    with image.writable(begin, end) as views:
        try:
            read(descriptor, file_offset, views)
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno == errno.EFAULT:
                raise TargetError("the target's memory is not writable") from error
            raise SourceCorrupt(f"the source's memory file cannot be read: {error}") from None


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    file_offset: int,
    views: Sequence[memoryview],
) -> None:
    for first in range(0, len(views), MAX_VIEWS):
        part = list(views[first : first + MAX_VIEWS])
        while part:
            transferred = call(descriptor, part, file_offset)
            if not transferred:
                raise OSError("unexpected end of a memory file")
            file_offset += transferred
            _, part = split(part, transferred)


def split(views: Sequence[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """Split views into the first `count` bytes and the rest."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            first = [*views[:index], view[:count]] if count else list(views[:index])
            return first, [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return list(views), []
