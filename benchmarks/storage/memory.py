"""Memory of the loading process: its peak, and checks that every byte is really in memory."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.memory_reserve import memory_field

STATUS, MAPS, CLEAR_REFS = (Path("/proc/self") / name for name in ("status", "maps", "clear_refs"))
RESET_PEAK = "5"


def resident() -> int:
    """Return the bytes of this process that are in memory now (VmRSS)."""
    return memory_field(STATUS, "VmRSS")


def peak_resident() -> int:
    """Return the peak since `reset_peak` (VmHWM)."""
    return memory_field(STATUS, "VmHWM")


def reset_peak() -> None:
    """Reset the peak to what is in memory now."""
    CLEAR_REFS.write_text(RESET_PEAK)


def cpu_seconds() -> float:
    """Return the CPU time, user and system, of this process and its finished children."""
    usages = (resource.getrusage(usage_scope) for usage_scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def touch(tensors: Mapping[str, torch.Tensor]) -> int:
    """Read one byte of every page of every tensor, so that mapped pages are read too."""
    total = 0
    for begin, end in spans((tensor.data_ptr(), tensor.nbytes) for tensor in tensors.values()):
        pages = (ctypes.c_uint8 * (end - begin)).from_address(begin)
        total += int(np.frombuffer(memoryview(pages).cast("B"), dtype=np.uint8)[:: mmap.PAGESIZE].sum())
    return total


def spans(areas: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Return the runs of complete pages, as begin and end, that cover these areas (address, length), and no
    other page.
    """
    page = mmap.PAGESIZE
    begin = end = 0
    for address, length in sorted(areas):
        if not length:
            continue
        first, last = address - address % page, -(-(address + length) // page) * page
        if begin != end and first > end:
            yield begin, end
            begin = end = 0
        if begin == end:
            begin, end = first, last
        else:
            end = max(end, last)
    if begin != end:
        yield begin, end


def are_mapped(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return True if any of them is in a mapped file, not in this process's own memory."""
    begins, ends = [], []
    for line in MAPS.read_text().splitlines():
        area, _, _, _, inode, *_ = line.split()
        if int(inode):
            begin, end = (int(address, 16) for address in area.split("-"))
            begins.append(begin)
            ends.append(end)
    for tensor in tensors.values():
        index = bisect.bisect_right(begins, tensor.data_ptr()) - 1
        if index >= 0 and tensor.data_ptr() < ends[index]:
            return True
    return False
