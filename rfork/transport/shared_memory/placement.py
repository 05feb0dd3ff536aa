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
LEAST_MAPPED: Final = 64 << 10
"""Bytes of a run under which it is copied: a mapping costs the kernel more, for the rest of its life."""
MOST_PLACES: Final = 512
"""Runs of one chunk that are placed, at most; a message has to hold them."""


class Run(NamedTuple):
    """A run of image bytes that lies in one piece, in memory or in a file: image offset, place, length."""

    begin: int
    place: int
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How image range `[begin, end)` lies in a memory file: from offset `starts[i]` on at `places[i]`."""

    begin: int
    end: int
    starts: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the file, at least."""
        lengths = (
            after - start for start, after in zip(self.starts, (*self.starts[1:], self.end), strict=True)
        )
        return max(place + length for place, length in zip(self.places, lengths, strict=True))

    def runs(self, begin: int, end: int) -> Iterator[Run]:
        """Where image range `[begin, end)`, part of the layout's, lies in the file."""
        index = bisect_right(self.starts, begin) - 1
        while begin < end:
            start, place = self.starts[index], self.places[index]
            after = self.starts[index + 1] if index + 1 < len(self.starts) else self.end
            until = min(after, end)
            yield Run(begin, place + begin - start, until - begin)
            begin, index = until, index + 1

    def told(self) -> list[int]:
        """For a message: starts, relative to `begin`, and places, in turns."""
        return [
            number
            for start, place in zip(self.starts, self.places, strict=True)
            for number in (start - self.begin, place)
        ]

    @classmethod
    def of(cls, begin: int, end: int, told: Sequence[int]) -> Layout:
        """What was told, once more. Raises ValueError where it is no layout of that range."""
        starts, places = [begin + number for number in told[::2]], tuple(told[1::2])
        rises = all(one < other for one, other in pairwise((*starts, end)))
        if not starts or len(starts) != len(places) or starts[0] != begin or not rises or min(places) < 0:
            raise ValueError(f"{len(told)} numbers that do not lay out [{begin}, {end})")
        return cls(begin, end, tuple(starts), places)

    @classmethod
    def wished(cls, begin: int, end: int, wishes: Sequence[int]) -> Layout:
        """The layout that fits wishes: offsets from `begin`, and bytes of a page to lie at, in turns.

        Raises ValueError for wishes that rise not, or are too many.
        """
        starts, places, before = [begin], [0], -1
        if len(wishes) % 2 or len(wishes) > 2 * MOST_PLACES:
            raise ValueError(f"{len(wishes)} numbers are no wishes")
        for offset, byte in zip(wishes[::2], wishes[1::2], strict=True):
            start = begin + offset
            if not before < offset < end - begin or not 0 <= byte < PAGE:
                raise ValueError(f"cannot place offset {offset} of [{begin}, {end}) at byte {byte} of a page")
            before, at = offset, places[-1] + start - starts[-1]
            at += (byte - at) % PAGE
            if start == starts[-1]:
                places[-1] = at
            else:
                starts.append(start)
                places.append(at)
        return cls(begin, end, tuple(starts), tuple(places))


def wishes_of(begin: int, mappable: Sequence[Run]) -> list[int]:
    """What to ask for, so that these runs of memory, of the range from `begin` on, can be mapped.

    The largest, where there are too many.
    """
    largest = sorted(mappable, key=lambda run: -run.length)[:MOST_PLACES]
    return [number for run in sorted(largest) for number in (run.begin - begin, run.place % PAGE)]


class Mapped(NamedTuple):
    """Whole pages: of the file from byte `place` on, over the memory at `address`; image offset `begin`."""

    begin: int
    address: int
    place: int
    length: int


def split(mappable: Sequence[Run], filed: Sequence[Run]) -> tuple[list[Mapped], list[Run]]:
    """Which pages of a file to map over which memory, and what is left to copy, as runs of the file.

    `mappable` are runs of memory, `filed` those of the file that hold the range to read; both rise.
    """
    pages: list[Mapped] = []
    copied: list[Run] = []
    memory = iter(mappable)
    run = next(memory, None)
    for begin, place, length in filed:
        at, end = begin, begin + length
        while run is not None and run.begin < end:
            first = max(run.begin, begin)
            address, offset = run.place + first - run.begin, place + first - begin
            skipped = -address % PAGE
            whole = (min(run.begin + run.length, end) - first - skipped) // PAGE * PAGE
            if (address - offset) % PAGE == 0 and whole >= max(PAGE, LEAST_MAPPED - 2 * PAGE):
                start = first + skipped
                if at < start:
                    copied.append(Run(at, place + at - begin, start - at))
                pages.append(Mapped(start, address + skipped, offset + skipped, whole))
                at = start + whole
            if run.begin + run.length > end:
                break
            run = next(memory, None)
        if at < end:
            copied.append(Run(at, place + at - begin, end - at))
    return pages, copied
