"""Which of this process's memory other pages may be put in place of. Runs on the target.

Only memory that the C library got for one allocation alone, and gives back as a whole: it never expects
anything of the pages again. Memory of its heaps is not: allocators give pages of those back, and count on
zeros when they touch them again, where a mapped file's bytes would be. Nor is memory that something else
than the processor knows by its pages: a GPU's driver, a network card, or one that is locked.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from rfork.image.host_memory import host_view
from rfork.image.memory import Image
from rfork.transport.shared_memory.file_layout import MIN_MAPPED_BYTES, PAGE, FileRun

FILE_NAME: Final = "rfork-chunk"
"""What memory files are called in /proc/PID/maps."""
_OWN_FILE: Final = f"/memfd:{FILE_NAME} (deleted)"
_LINE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ \S+ (\d+) *(.*)")
_PINNED: Final = re.compile(r"^Vm(?:Lck|Pin):\s*[1-9]", re.MULTILINE)
_DEVICES: Final = ("/dev/nvidia", "/dev/infiniband", "/dev/kfd", "/dev/dri")
CACHE_TTL_S: Final = 0.5
"""Seconds for which what the kernel said is good: it takes as long to say as a chunk to map."""
_HEADER: Final = 16
_BY_MMAP: Final = 2
"""The flag of glibc's chunk headers, alone, on memory that was mapped for one allocation."""


class MappedArea(NamedTuple):
    """Neighbouring private memory of this process, `[begin, end)`, that can be read and written."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ProcessMaps:
    """What the kernel says of a process's memory. `areas`: anonymous, or mapped from our files; they rise."""

    areas: tuple[MappedArea, ...]
    count: int
    by_device: bool

    @classmethod
    def of(cls, text: str) -> ProcessMaps:
        """Of the text of /proc/PID/maps; a line that cannot be read is of memory that is left alone."""
        areas: list[MappedArea] = []
        # A process has a thousand mappings, most of libraries: the few of interest are found first.
        for line in (line for line in text.splitlines() if " rw-p " in line):
            parsed = _LINE.match(line)
            if parsed is None:
                continue
            begin, end, inode, path = parsed.groups()
            if path != _OWN_FILE and (inode != "0" or (path and not path.startswith("[anon:"))):
                continue
            area = MappedArea(int(begin, 16), int(end, 16))
            if areas and areas[-1].end == area.begin:
                area = MappedArea(areas.pop().begin, area.end)
            areas.append(area)
        count, by_device = text.count("\n"), any(f" {device}" in text for device in _DEVICES)
        return cls(tuple(areas), count, by_device)

    def is_contiguous(self, begin: int, end: int) -> bool:
        """Whether all of this memory is in one area."""
        index = bisect_right(self.areas, begin, key=lambda area: area.begin) - 1
        return index >= 0 and end <= self.areas[index].end


def has_private_mapping(base: int, length: int, before: int, size: int) -> bool:
    """Whether an allocation of `length` bytes at `base` has a mapping of its own.

    `before` and `size` are the two words in front of it, as glibc writes them: its distance from the
    mapping's begin, and the rest of the mapping with flags.
    """
    rest = size & ~7
    header = base - _HEADER
    begins, ends = header - before, header + rest
    return size & 7 == _BY_MMAP and begins % PAGE == 0 and ends % PAGE == 0 and base + length <= ends and before < rest


class ReplaceableMemory:
    """The memory of one image of this process. Thread-safe."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._begins: Sequence[int] | None = None
        self._lock = threading.Lock()
        self._cached_maps: ProcessMaps | None = None
        self._cached_at = 0.0
        self._mappings_left = 0
        """Runs that may still be mapped until the kernel is asked again."""

    def remappable_ranges(self, begin: int, end: int) -> list[FileRun]:
        """The runs of image range `[begin, end)`, by address, that other pages may be put in place of."""
        large = [FileRun(*run) for run in self._image.segments(begin, end) if run.length >= MIN_MAPPED_BYTES]
        if not large:
            return []
        found = [run for run in large if self._is_free(run, self._read_maps())]
        with self._lock:
            found = found[: self._mappings_left]
            self._mappings_left -= len(found)
        return found

    def _read_maps(self) -> ProcessMaps:
        """What the kernel says of this process, a moment ago at most."""
        with self._lock:
            now = time.monotonic()
            if self._cached_maps is None or now - self._cached_at > CACHE_TTL_S:
                (self._cached_maps, self._mappings_left), self._cached_at = _read_maps(), now
            return self._cached_maps

    def _is_free(self, run: FileRun, known: ProcessMaps) -> bool:
        base, length = self._allocation(run.begin)
        if not base <= run.file_offset <= run.file_offset + run.length <= base + length:
            return False
        if not known.is_contiguous(base - _HEADER, base + length):
            return False
        header = host_view(base - _HEADER, _HEADER)
        return has_private_mapping(base, length, *_words(header))

    def _allocation(self, begin: int) -> tuple[int, int]:
        """Address and length of the storage that image offset `begin` lies in."""
        regions = self._image.regions
        if self._begins is None:
            self._begins = [*accumulate(regions.lengths, initial=0)]
        storage = regions.storages[bisect_right(self._begins, begin) - 1]
        return storage.data_ptr(), storage.nbytes()


def _read_maps() -> tuple[ProcessMaps, int]:
    nothing = ProcessMaps((), 0, by_device=False), 0
    try:
        known = ProcessMaps.of(Path("/proc/self/maps").read_text("utf-8", "replace"))
        status = Path("/proc/self/status").read_text("utf-8", "replace")
        max_mappings = int(Path("/proc/sys/vm/max_map_count").read_text("ascii"))
    except (OSError, ValueError):
        return nothing
    if known.by_device or _PINNED.search(status):
        return nothing
    # Each takes one mapping more, or two where it parts another; half of them stay free for others.
    return known, max(0, (max_mappings // 2 - known.count) // 2)


def _words(header: memoryview) -> tuple[int, int]:
    return int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
