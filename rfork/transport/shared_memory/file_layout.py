"""Where the bytes of a chunk lie in its memory file, and which of them can be mapped. Values only.

A page of a file can stand for a page of a tensor only where both begin at the same byte of a page. So who
asks for a chunk says where its tensors begin, and the file is laid out to fit: a few bytes of it are left
out wherever a tensor begins. Those who ask later have mostly the same program, and so the same places.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

PAGE: Final = mmap.PAGESIZE
MIN_MAPPED_BYTES: Final = 64 << 10
"""Bytes of a run under which it is copied: a mapping costs the kernel more, for the rest of its life."""
MAX_PIECES: Final = 512
"""Runs of one chunk that are placed, at most; a message has to hold them."""


class FileRun(NamedTuple):
    """A run of image bytes that lies in one piece, in memory or in a file: image offset, place, length."""

    begin: int
    file_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """How image range `[begin, end)` lies in a memory file: from offset `starts[i]` on at `places[i]`."""

    begin: int
    end: int
    starts: tuple[int, ...]
    file_offsets: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the file, at least."""
        lengths = (after - start for start, after in zip(self.starts, (*self.starts[1:], self.end), strict=True))
        return max(file_offset + length for file_offset, length in zip(self.file_offsets, lengths, strict=True))

    def runs(self, begin: int, end: int) -> Iterator[FileRun]:
        """Where image range `[begin, end)`, part of the layout's, lies in the file."""
        index = bisect_right(self.starts, begin) - 1
        while begin < end:
            start, file_offset = self.starts[index], self.file_offsets[index]
            after = self.starts[index + 1] if index + 1 < len(self.starts) else self.end
            until = min(after, end)
            yield FileRun(begin, file_offset + begin - start, until - begin)
            begin, index = until, index + 1

    def to_message(self) -> list[int]:
        """For a message: starts, relative to `begin`, and places, in turns."""
        return [
            number
            for start, file_offset in zip(self.starts, self.file_offsets, strict=True)
            for number in (start - self.begin, file_offset)
        ]

    @classmethod
    def from_message(cls, begin: int, end: int, numbers: Sequence[int]) -> FileLayout:
        """What was told, once more. Raises ValueError where it is no layout of that range."""
        starts, file_offsets = [begin + number for number in numbers[::2]], tuple(numbers[1::2])
        rises = all(one < other for one, other in pairwise((*starts, end)))
        if not starts or len(starts) != len(file_offsets) or starts[0] != begin or not rises or min(file_offsets) < 0:
            raise ValueError(f"{len(numbers)} numbers that do not lay out [{begin}, {end})")
        return cls(begin, end, tuple(starts), file_offsets)

    @classmethod
    def requested(cls, begin: int, end: int, wishes: Sequence[int]) -> FileLayout:
        """The layout that fits wishes: offsets from `begin`, and bytes of a page to lie at, in turns.

        Raises ValueError for wishes that rise not, or are too many.
        """
        starts, file_offsets, before = [begin], [0], -1
        if len(wishes) % 2 or len(wishes) > 2 * MAX_PIECES:
            raise ValueError(f"{len(wishes)} numbers are no wishes")
        for offset, byte in zip(wishes[::2], wishes[1::2], strict=True):
            start = begin + offset
            if not before < offset < end - begin or not 0 <= byte < PAGE:
                raise ValueError(f"cannot place offset {offset} of [{begin}, {end}) at byte {byte} of a page")
            before, at = offset, file_offsets[-1] + start - starts[-1]
            at += (byte - at) % PAGE
            if start == starts[-1]:
                file_offsets[-1] = at
            else:
                starts.append(start)
                file_offsets.append(at)
        return cls(begin, end, tuple(starts), tuple(file_offsets))


def layout_request(begin: int, mappable: Sequence[FileRun]) -> list[int]:
    """What to ask for, so that these runs of memory, of the range from `begin` on, can be mapped.

    The largest, where there are too many.
    """
    largest_runs = sorted(mappable, key=lambda run: -run.length)[:MAX_PIECES]
    return [number for run in sorted(largest_runs) for number in (run.begin - begin, run.file_offset % PAGE)]


class MappedRun(NamedTuple):
    """Whole pages: of the file from byte `file_offset` on, over the memory at `address`; image offset `begin`."""

    begin: int
    address: int
    file_offset: int
    length: int


def split_mappable(mappable: Sequence[FileRun], filed: Sequence[FileRun]) -> tuple[list[MappedRun], list[FileRun]]:
    """Which pages of a file to map over which memory, and what is left to copy, as runs of the file.

    `mappable` are runs of memory, `filed` those of the file that hold the range to read; both rise.
    """
    pages: list[MappedRun] = []
    copied: list[FileRun] = []
    memory = iter(mappable)
    run = next(memory, None)
    for begin, file_offset, length in filed:
        at, end = begin, begin + length
        while run is not None and run.begin < end:
            first = max(run.begin, begin)
            address, offset = run.file_offset + first - run.begin, file_offset + first - begin
            skipped = -address % PAGE
            mappable_bytes = (min(run.begin + run.length, end) - first - skipped) // PAGE * PAGE
            if (address - offset) % PAGE == 0 and mappable_bytes >= max(PAGE, MIN_MAPPED_BYTES - 2 * PAGE):
                start = first + skipped
                if at < start:
                    copied.append(FileRun(at, file_offset + at - begin, start - at))
                pages.append(MappedRun(start, address + skipped, offset + skipped, mappable_bytes))
                at = start + mappable_bytes
            if run.begin + run.length > end:
                break
            run = next(memory, None)
        if at < end:
            copied.append(FileRun(at, file_offset + at - begin, end - at))
    return pages, copied
