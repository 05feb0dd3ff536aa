"""Memory regions of an image that are registered with network cards.

Registration time depends more on the number of regions than on their size, so there should be few. A network
card's region must lie inside one CUDA allocation, and torch's allocator puts many tensors into one: a
*segment*. So a device has one region per segment, from the first image byte in it to the last. Memory between
two tensors of a segment is registered too.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from rfork.image.memory import Image
from rfork.image.staging import CPU

Region = tuple[int, int]
"""Address and length in bytes."""


class ContiguousRun(NamedTuple):
    """Image bytes that are contiguous in memory; `storage` is the first address of their storage."""

    address: int
    length: int
    storage: int
    on_host: bool


class AllocatorSegment(NamedTuple):
    """Memory that torch's CUDA allocator obtained in one call, or (`expandable`) mapped in one address range."""

    address: int
    length: int
    expandable: bool


def merge_regions(runs: Iterable[ContiguousRun], segments: Sequence[AllocatorSegment]) -> list[Region]:
    """Return the disjoint regions that contain `runs`, sorted.

    In host memory, runs less than a page (4096 bytes) apart form one region: the bytes between them lie on
    the pages of their ends, so the complete region is mapped. On a device, all runs of one allocator segment
    form one region. If the allocator does not know the memory (an engine's own arena or pool), runs of one
    storage less than a page apart form one, because two storages may be two allocations however close they
    are.

    So a device's region lies inside one CUDA allocation, with two exceptions: an expandable segment is one
    address range over several pieces of memory, and an unknown storage may be. Libraries differ in whether
    they can register such a range; the caller must handle their errors.
    """
    ordered = sorted(segments)
    begins = [segment.address for segment in ordered]
    found: list[tuple[int, int, tuple[str, int]]] = []  # begin, end, and the memory that contains it
    for run in sorted(runs):
        if not run.length:
            continue
        end = run.address + run.length
        memory, gap = _containing_allocation(run, end, ordered, begins)
        if found and found[-1][2] == memory and run.address - found[-1][1] < gap:
            found[-1] = (found[-1][0], max(found[-1][1], end), memory)
        else:
            found.append((run.address, end, memory))
    return [(begin, end - begin) for begin, end, _ in found]


def _containing_allocation(
    run: ContiguousRun, end: int, segments: Sequence[AllocatorSegment], begins: Sequence[int]
) -> tuple[tuple[str, int], int]:
    """Return the memory that contains a run, and the maximum gap between two runs in it that form one region."""
    if run.on_host:
        return ("host", 0), mmap.PAGESIZE
    index = bisect_right(begins, run.address) - 1
    if index >= 0 and end <= begins[index] + segments[index].length:
        return ("segment", index), segments[index].length
    return ("storage", run.storage), mmap.PAGESIZE


def merge_host_regions(addresses: Sequence[int], lengths: Sequence[int]) -> list[Region]:
    """Like `merge_regions`, for runs in host memory only: there may be tens of thousands of them."""
    begins: list[int] = []
    ends: list[int] = []
    reached = -mmap.PAGESIZE
    for address, length in sorted(zip(addresses, lengths, strict=True)):
        if not length:
            continue
        end = address + length
        if address - reached >= mmap.PAGESIZE:
            begins.append(address)
            ends.append(end)
            reached = end
        elif end > reached:
            ends[-1] = reached = end
    return [(begin, end - begin) for begin, end in zip(begins, ends, strict=True)]


def regions_to_register(image: Image) -> list[Region]:
    """Return the current regions of `image` in this process's allocators; see `merge_regions`."""
    if image.devices <= {CPU}:
        return merge_host_regions(image.runs.addresses, image.runs.lengths)
    return merge_regions(contiguous_runs(image), allocator_segments() if _on_cuda(image) else ())


def uses_expandable_segments(image: Image) -> bool:
    """Return True if torch put any of the image into growing segments (its option ``expandable_segments``)."""
    if not _on_cuda(image):
        return False
    expandable_segments = [segment for segment in allocator_segments() if segment.expandable]
    return any(
        segment.address <= run.address < segment.address + segment.length
        for run in contiguous_runs(image)
        if not run.on_host
        for segment in expandable_segments
    )


def contiguous_runs(image: Image) -> list[ContiguousRun]:
    """Return the runs of memory of an image, in image order."""
    runs = image.runs
    devices = map(attrgetter("device.type"), runs.storages)
    return [
        ContiguousRun(address, length, 0 if device == "cpu" else storage.data_ptr(), device == "cpu")
        for address, length, storage, device in zip(runs.addresses, runs.lengths, runs.storages, devices, strict=True)
    ]


def allocator_segments() -> list[AllocatorSegment]:
    """Return the segments of torch's CUDA allocator on all devices and pools; none if it was replaced."""
    try:
        snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    except RuntimeError:  # a pluggable allocator has no snapshot
        return []
    return [
        AllocatorSegment(int(segment["address"]), int(segment["total_size"]), bool(segment.get("is_expandable", False)))
        for segment in snapshot
    ]


def _on_cuda(image: Image) -> bool:
    return any(device.type == "cuda" for device in image.devices)
