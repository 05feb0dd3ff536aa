"""Memory files of chunks: made and sealed on the source, checked on the target.

A sealed file can be changed by nobody any more, whoever holds it: what was verified once stays right, and
who maps it needs no fence.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from rfork.errors import SourceCorrupt
from rfork.image.memory import Image
from rfork.transport.shared_memory.file_layout import FileLayout, FileRun
from rfork.transport.shared_memory.memory_maps import FILE_NAME
from rfork.transport.shared_memory.remap import PageRemapper

MAX_VIEWS: Final = 1024
"""Views of one system call, at most (IOV_MAX)."""
# From <linux/fcntl.h>, as Python has them on Linux only.
_ADD_SEALS: Final = 1033
_GET_SEALS: Final = 1034
_SEAL_SEAL: Final = 1
_IMMUTABLE: Final = 2 | 4 | 8
"""Neither shrunk, nor grown, nor written."""


class Descriptor:
    """An open file descriptor, closed with the last one who holds this."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._end = weakref.finalize(self, os.close, number)

    def empty(self) -> None:
        """Give the bytes of an unsealed file back to the system, whoever else has it open."""
        os.ftruncate(self.number, 0)


def memory_file(*, sealable: bool = True) -> Descriptor:
    """An empty memory file. Who is given one that is not `sealable` cannot keep it from being emptied.

    Raises OSError.
    """
    return Descriptor(os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealable else 0)))


class SealedChunk:
    """A range of an image in a sealed memory file."""

    def __init__(self, descriptor: Descriptor, layout: FileLayout) -> None:
        self.descriptor = descriptor
        self.layout = layout
        self.proven = ""
        """The source's etag under which its bytes are known to be the image's."""

    @classmethod
    def create(cls, descriptor: Descriptor, layout: FileLayout) -> SealedChunk:
        """Seal a file that holds a range of the image. Raises OSError."""
        fcntl.fcntl(descriptor.number, _ADD_SEALS, _IMMUTABLE | _SEAL_SEAL)
        return cls(descriptor, layout)

    @classmethod
    def from_fd(cls, descriptor: Descriptor, layout: FileLayout) -> SealedChunk:
        """One that came from elsewhere. Raises SourceCorrupt when it can be changed, or is too short."""
        try:
            seals = fcntl.fcntl(descriptor.number, _GET_SEALS)
            size = os.fstat(descriptor.number).st_size
        except OSError:
            raise SourceCorrupt("the source gave something that is no memory file") from None
        if seals & _IMMUTABLE != _IMMUTABLE or size < layout.size:
            raise SourceCorrupt("the source gave a memory file that can still be changed, or is too short")
        return cls(descriptor, layout)

    def content_equals(self, image: Image, begin: int, end: int, kernel: PageRemapper) -> bool:
        """Whether the image has the same bytes in `[begin, end)`, a part of this range. Raises OSError."""
        mapping = mmap.mmap(self.descriptor.number, self.layout.size, mmap.MAP_PRIVATE)
        with contextlib.closing(mapping), image.readable(begin, end) as views:
            return _same(memoryview(mapping), self.layout.runs(begin, end), views, kernel)


def _same(file_view: memoryview, runs: Iterable[FileRun], views: Sequence[memoryview], kernel: PageRemapper) -> bool:
    left = list(views)
    for run in runs:
        part, left = split(left, run.length)
        file_offset = run.file_offset
        for view in part:
            if not kernel.equal(file_view[file_offset : file_offset + view.nbytes], view):
                return False
            file_offset += view.nbytes
    return True


def write(descriptor: Descriptor, layout: FileLayout, begin: int, views: Sequence[memoryview]) -> None:
    """Write image bytes from offset `begin` on to where the layout has them. Raises OSError."""
    end = begin + sum(view.nbytes for view in views)
    left = list(views)
    for run in layout.runs(begin, end):
        part, left = split(left, run.length)
        _transfer(os.pwritev, descriptor, run.file_offset, part)


def read(descriptor: Descriptor, file_offset: int, views: Sequence[memoryview]) -> None:
    """Fill views from the file, from byte `file_offset` on. Raises OSError, also where the file ends."""
    _transfer(os.preadv, descriptor, file_offset, views)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: Descriptor,
    file_offset: int,
    views: Sequence[memoryview],
) -> None:
    for first in range(0, len(views), MAX_VIEWS):
        part = list(views[first : first + MAX_VIEWS])
        while part:
            moved = call(descriptor.number, part, file_offset)
            if not moved:
                raise OSError("a memory file ended")
            file_offset += moved
            _, part = split(part, moved)


def split(views: Sequence[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `count` bytes of a line of views, and the rest."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            first = [*views[:index], view[:count]] if count else list(views[:index])
            return first, [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return list(views), []
