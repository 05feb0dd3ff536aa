"""Layout of a chunk's bytes in its memory file, and the pages that can be mapped. Pure functions.

A page of a file can replace a page of a tensor only if both start at the same offset within a page. So a
request contains the page offsets of the reader's tensors, and the file is laid out accordingly, with small
gaps between tensors. Later readers usually run the same program, and so have the same offsets.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from rfork.image.host_memory import MIN_MAPPED_BYTES

PAGE: Final = mmap.PAGESIZE
MAX_PIECES: Final = 512
"""Maximum number of aligned runs of one chunk, limited by the message size."""


class FileRun(NamedTuple):
    """Image bytes that are contiguous in memory or in a file: image offset, file offset or address, length."""

    begin: int
    file_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Layout of image range `[begin, end)` in a file: bytes from `starts[i]` on are at `file_offsets[i]`."""

    begin: int
    end: int
    starts: tuple[int, ...]
    file_offsets: tuple[int, ...]

    @property
    def size(self) -> int:
        """Minimum size of the file."""
        lengths = (after - start for start, after in zip(self.starts, (*self.starts[1:], self.end), strict=True))
        return max(file_offset + length for file_offset, length in zip(self.file_offsets, lengths, strict=True))

    def runs(self, begin: int, end: int) -> Iterator[FileRun]:
        """Yield the file runs of image range `[begin, end)`, which is part of the layout's range."""
        index = bisect_right(self.starts, begin) - 1
        while begin < end:
            start, file_offset = self.starts[index], self.file_offsets[index]
            after = self.starts[index + 1] if index + 1 < len(self.starts) else self.end
            until = min(after, end)
            yield FileRun(begin, file_offset + begin - start, until - begin)
            begin, index = until, index + 1

    def to_message(self) -> list[int]:
        """Encode for a message: starts relative to `begin`, alternating with file offsets."""
        return [
            number
            for start, file_offset in zip(self.starts, self.file_offsets, strict=True)
            for number in (start - self.begin, file_offset)
        ]

    @classmethod
    def from_message(cls, begin: int, end: int, numbers: Sequence[int]) -> FileLayout:
        """Decode a message. Raises ValueError if it is not a valid layout of the range."""
        starts, file_offsets = [begin + number for number in numbers[::2]], tuple(numbers[1::2])
        is_ascending = all(a < b for a, b in pairwise((*starts, end)))
        if (
            not starts
            or len(starts) != len(file_offsets)
            or starts[0] != begin
            or not is_ascending
            or min(file_offsets) < 0
        ):
            raise ValueError(f"{len(numbers)} numbers are not a layout of [{begin}, {end})")
        return cls(begin, end, tuple(starts), file_offsets)

    @classmethod
    def requested(cls, begin: int, end: int, alignment: Sequence[int]) -> FileLayout:
        """Return the layout for a request: offsets from `begin`, alternating with required offsets within a
        page.

        Raises ValueError if the offsets are not ascending or too many.
        """
        starts, file_offsets, previous = [begin], [0], -1
        if len(alignment) % 2 or len(alignment) > 2 * MAX_PIECES:
            raise ValueError(f"{len(alignment)} numbers are not a valid alignment request")
        for offset, byte in zip(alignment[::2], alignment[1::2], strict=True):
            start = begin + offset
            if not previous < offset < end - begin or not 0 <= byte < PAGE:
                raise ValueError(f"cannot place offset {offset} of [{begin}, {end}) at byte {byte} of a page")
            previous, at = offset, file_offsets[-1] + start - starts[-1]
            at += (byte - at) % PAGE
            if start == starts[-1]:
                file_offsets[-1] = at
            else:
                starts.append(start)
                file_offsets.append(at)
        return cls(begin, end, tuple(starts), tuple(file_offsets))


def alignment_request(begin: int, mappable: Sequence[FileRun]) -> list[int]:
    """Return the alignment request with which these memory runs, of the range from `begin` on, can be mapped.

    If there are too many runs, includes only the longest.
    """
    selected_runs = sorted(mappable, key=lambda run: -run.length)[:MAX_PIECES]
    return [number for run in sorted(selected_runs) for number in (run.begin - begin, run.file_offset % PAGE)]


class MappedRun(NamedTuple):
    """Pages of the file from `file_offset` on that replace the memory at `address`; image offset `begin`."""

    begin: int
    address: int
    file_offset: int
    length: int


def split_mappable(mappable: Sequence[FileRun], file_runs: Sequence[FileRun]) -> tuple[list[MappedRun], list[FileRun]]:
    """Return the pages of a file to map, and the remaining file runs to copy.

    `mappable` are runs of memory, `file_runs` the runs of the file with the range to read; both ascending.
    """
    pages: list[MappedRun] = []
    copied: list[FileRun] = []
    memory = iter(mappable)
    run = next(memory, None)
    for begin, file_offset, length in file_runs:
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
