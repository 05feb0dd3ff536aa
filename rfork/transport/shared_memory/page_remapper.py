"""Replaces pages of this process by pages of a file, copy-on-write. Runs on the target.

Only memory that the C library mapped for a single allocation, and unmaps as one: it never reuses the pages.
Heap memory is excluded: allocators release heap pages and expect zeros when they touch them again, but would
find a mapped file's bytes. Also excluded is memory that is pinned, or that a GPU driver or a network card may
access by physical page.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from rfork.image.host_memory import MIN_MAPPED_BYTES, host_view
from rfork.image.memory import Image
from rfork.transport.same_host.memory_file import FILE_NAME
from rfork.transport.shared_memory.file_layout import PAGE, FileRun

_OWN_FILE: Final = f"/memfd:{FILE_NAME} (deleted)"
_LINE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ \S+ (\d+) *(.*)")
_PINNED: Final = re.compile(r"^Vm(?:Lck|Pin):\s*[1-9]", re.MULTILINE)
_DEVICES: Final = ("/dev/nvidia", "/dev/infiniband", "/dev/kfd", "/dev/dri")
CACHE_TTL_S: Final = 0.5
"""Seconds for which the maps are cached: reading them takes as long as mapping a chunk."""
_HEADER: Final = 16
_BY_MMAP: Final = 2
"""Only this flag is set in glibc's chunk header for memory that was mapped for one allocation."""
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

    def replace(self, address: int, length: int, descriptor: int, offset: int) -> None:
        """Atomically replace the pages at `address` by a private mapping of the file from `offset` on.

        All pages are populated when this returns, so no page faults occur later (except before Linux 5.14).
        Raises OSError; the memory is then unchanged or, if the kernel failed halfway, zeroed.
        """
        # Otherwise the move frees the old pages, while no other thread can change the memory map.
        self._madvise(address, length, mmap.MADV_DONTNEED)
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

    def _restore(self, address: int, length: int) -> None:
        """Map memory again after a failed move, which may have removed the old pages."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        # Has no effect if the old pages still exist.
        self._mmap(address, length, _READ_WRITE, flags, -1, 0)


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


class MappedArea(NamedTuple):
    """Contiguous private memory of this process, `[begin, end)`, readable and writable."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ProcessMaps:
    """Memory map of a process. `areas`: anonymous memory, or mapped from our files; ascending."""

    areas: tuple[MappedArea, ...]
    count: int
    by_device: bool

    @classmethod
    def parse(cls, text: str) -> ProcessMaps:
        """Parse /proc/PID/maps; lines that cannot be parsed are skipped."""
        areas: list[MappedArea] = []
        # A process has a thousand mappings, most of them libraries: preselect the relevant lines.
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
        """Return True if this memory is in one area."""
        index = bisect_right(self.areas, begin, key=lambda area: area.begin) - 1
        return index >= 0 and end <= self.areas[index].end


def has_private_mapping(base: int, length: int, before: int, size: int) -> bool:
    """Return True if an allocation of `length` bytes at `base` has a separate mapping.

    `before` and `size` are the two words before it in glibc's format: its distance from the start of the
    mapping, and the rest of the mapping with flags.
    """
    rest = size & ~7
    header = base - _HEADER
    begins, ends = header - before, header + rest
    return size & 7 == _BY_MMAP and begins % PAGE == 0 and ends % PAGE == 0 and base + length <= ends and before < rest


class ReplaceableMemory:
    """The replaceable memory of one image. Thread-safe."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._begins: Sequence[int] | None = None
        self._lock = threading.Lock()
        self._cached_maps: ProcessMaps | None = None
        self._cached_at = 0.0
        self._mappings_left = 0
        """Runs that may still be mapped before the maps are read again."""

    def remappable_ranges(self, begin: int, end: int) -> list[FileRun]:
        """Return the runs of image range `[begin, end)`, by address, whose pages may be replaced."""
        large = [FileRun(*run) for run in self._image.segments(begin, end) if run.length >= MIN_MAPPED_BYTES]
        if not large:
            return []
        runs = [run for run in large if self._is_replaceable(run, self._read_maps())]
        with self._lock:
            runs = runs[: self._mappings_left]
            self._mappings_left -= len(runs)
        return runs

    def _read_maps(self) -> ProcessMaps:
        """Return the current memory map, cached for `CACHE_TTL_S`."""
        with self._lock:
            now = time.monotonic()
            if self._cached_maps is None or now - self._cached_at > CACHE_TTL_S:
                (self._cached_maps, self._mappings_left), self._cached_at = _read_maps(), now
            return self._cached_maps

    def _is_replaceable(self, run: FileRun, maps: ProcessMaps) -> bool:
        base, length = self._allocation(run.begin)
        if not base <= run.file_offset <= run.file_offset + run.length <= base + length:
            return False
        if not maps.is_contiguous(base - _HEADER, base + length):
            return False
        header = host_view(base - _HEADER, _HEADER)
        return has_private_mapping(base, length, *_words(header))

    def _allocation(self, begin: int) -> tuple[int, int]:
        """Return address and length of the storage that contains image offset `begin`."""
        regions = self._image.regions
        if self._begins is None:
            self._begins = [*accumulate(regions.lengths, initial=0)]
        storage = regions.storages[bisect_right(self._begins, begin) - 1]
        return storage.data_ptr(), storage.nbytes()


def _read_maps() -> tuple[ProcessMaps, int]:
    empty = ProcessMaps((), 0, by_device=False), 0
    try:
        maps = ProcessMaps.parse(Path("/proc/self/maps").read_text("utf-8", "replace"))
        status = Path("/proc/self/status").read_text("utf-8", "replace")
        max_mappings = int(Path("/proc/sys/vm/max_map_count").read_text("ascii"))
    except (OSError, ValueError):
        return empty
    if maps.by_device or _PINNED.search(status):
        return empty
    # Each run needs one more mapping, or two if it splits another; half of the limit stays free for other
    # uses.
    return maps, max(0, (max_mappings // 2 - maps.count) // 2)


def _words(header: memoryview) -> tuple[int, int]:
    return int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
