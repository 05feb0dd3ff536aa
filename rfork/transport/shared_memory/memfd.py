"""Memory files with chunks: created and sealed on the source, validated on the target.

A sealed file can no longer be changed by any process, so verified bytes stay valid and a mapping needs no
fence.
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
"""Maximum views per system call (IOV_MAX)."""
# From <linux/fcntl.h>; Python defines them only on Linux.
_ADD_SEALS: Final = 1033
_GET_SEALS: Final = 1034
_SEAL_SEAL: Final = 1
_IMMUTABLE: Final = 2 | 4 | 8
"""Seals against shrinking, growing and writing."""


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


class SealedChunk:
    """A range of an image in a sealed memory file."""

    def __init__(self, descriptor: Descriptor, layout: FileLayout) -> None:
        self.descriptor = descriptor
        self.layout = layout
        self.verified_etag = ""
        """Etag of the source for which the bytes are known to equal the image; empty if unknown."""

    @classmethod
    def create(cls, descriptor: Descriptor, layout: FileLayout) -> SealedChunk:
        """Seal a file that contains a range of the image. Raises OSError."""
        fcntl.fcntl(descriptor.number, _ADD_SEALS, _IMMUTABLE | _SEAL_SEAL)
        return cls(descriptor, layout)

    @classmethod
    def from_fd(cls, descriptor: Descriptor, layout: FileLayout) -> SealedChunk:
        """Wrap a received descriptor. Raises SourceCorrupt if the file is not sealed or too short."""
        try:
            seals = fcntl.fcntl(descriptor.number, _GET_SEALS)
            size = os.fstat(descriptor.number).st_size
        except OSError:
            raise SourceCorrupt("the source sent a descriptor that is not a memory file") from None
        if seals & _IMMUTABLE != _IMMUTABLE or size < layout.size:
            raise SourceCorrupt("the source sent a memory file that is not sealed or too short")
        return cls(descriptor, layout)

    def content_equals(self, image: Image, begin: int, end: int, remapper: PageRemapper) -> bool:
        """Return True if `[begin, end)`, a part of this range, has the same bytes as the image. Raises
        OSError.
        """
        mapping = mmap.mmap(self.descriptor.number, self.layout.size, mmap.MAP_PRIVATE)
        with contextlib.closing(mapping), image.readable(begin, end) as views:
            return _equal(memoryview(mapping), self.layout.runs(begin, end), views, remapper)


def _equal(file_view: memoryview, runs: Iterable[FileRun], views: Sequence[memoryview], remapper: PageRemapper) -> bool:
    rest = list(views)
    for run in runs:
        part, rest = split(rest, run.length)
        file_offset = run.file_offset
        for view in part:
            if not remapper.equal(file_view[file_offset : file_offset + view.nbytes], view):
                return False
            file_offset += view.nbytes
    return True


def write(descriptor: Descriptor, layout: FileLayout, begin: int, views: Sequence[memoryview]) -> None:
    """Write image bytes from offset `begin` on to their places in the file. Raises OSError."""
    end = begin + sum(view.nbytes for view in views)
    rest = list(views)
    for run in layout.runs(begin, end):
        part, rest = split(rest, run.length)
        _transfer(os.pwritev, descriptor, run.file_offset, part)


def read(descriptor: Descriptor, file_offset: int, views: Sequence[memoryview]) -> None:
    """Fill views from byte `file_offset` of the file on. Raises OSError, also at the end of the file."""
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
            transferred = call(descriptor.number, part, file_offset)
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
