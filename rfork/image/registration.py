"""Which areas of memory hold an image: what is registered where a network card is to reach it.

To register memory takes time for each area more than for each byte, so there should be few of them. A
network card's area has to lie inside one CUDA allocation, and torch's allocator puts many tensors into one:
a *segment*. So on a device there is one area for each segment, from the first image byte in it to the
last. What lies between two tensors of a segment is then registered too.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from rfork.image.memory import Image
from rfork.image.storages import CPU

Region = tuple[int, int]
"""Address, and length in bytes."""


class ContiguousRun(NamedTuple):
    """Image bytes that are one run of memory: `storage` is the first address of the storage they lie in."""

    address: int
    length: int
    storage: int
    on_host: bool


class AllocatorSegment(NamedTuple):
    """What torch's CUDA allocator got from CUDA at once, or (`expandable`) mapped in one line."""

    address: int
    length: int
    expandable: bool


def merge_regions(runs: Iterable[ContiguousRun], segments: Sequence[AllocatorSegment]) -> list[Region]:
    """The areas that hold `runs`: sorted, and apart from one another.

    Of host memory, runs less than a page (4096 bytes) apart are one area: all bytes between them lie on the
    two pages that hold their ends, so the whole area is mapped. On a device, all runs of one segment of the
    allocator are; where it does not know the memory (an engine's own arena or pool), those of one storage
    that are less than a page apart, as two storages may be two allocations however near they lie.

    So a device's area is inside one CUDA allocation, but in two cases: an expandable segment is one range
    of addresses over many pieces of memory, and an unknown storage may be. Libraries differ in whether they
    register such a range; what they say of it is the caller's to tell.
    """
    ordered = sorted(segments)
    begins = [segment.address for segment in ordered]
    found: list[tuple[int, int, tuple[str, int]]] = []  # begin, end, and the memory that it is in
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
    """What a run lies in, and how far from it another one in the same may be to be in one area with it."""
    if run.on_host:
        return ("host", 0), mmap.PAGESIZE
    index = bisect_right(begins, run.address) - 1
    if index >= 0 and end <= begins[index] + segments[index].length:
        return ("segment", index), segments[index].length
    return ("storage", run.storage), mmap.PAGESIZE


def merge_host_regions(addresses: Sequence[int], lengths: Sequence[int]) -> list[Region]:
    """As `merge_regions`, of runs that all lie in host memory: there may be tens of thousands of them."""
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
    """The areas that hold `image`, as its process's allocators have it now; see `merge_regions`."""
    if image.devices <= {CPU}:
        return merge_host_regions(image.runs.addresses, image.runs.lengths)
    return merge_regions(contiguous_runs(image), allocator_segments() if _on_cuda(image) else ())


def uses_expandable_segments(image: Image) -> bool:
    """Whether torch put any of it into segments that grow (its option ``expandable_segments``)."""
    if not _on_cuda(image):
        return False
    growing = [segment for segment in allocator_segments() if segment.expandable]
    return any(
        segment.address <= run.address < segment.address + segment.length
        for run in contiguous_runs(image)
        if not run.on_host
        for segment in growing
    )


def contiguous_runs(image: Image) -> list[ContiguousRun]:
    """The runs of memory of an image, in image order."""
    runs = image.runs
    devices = map(attrgetter("device.type"), runs.storages)
    return [
        ContiguousRun(address, length, 0 if device == "cpu" else storage.data_ptr(), device == "cpu")
        for address, length, storage, device in zip(runs.addresses, runs.lengths, runs.storages, devices, strict=True)
    ]


def allocator_segments() -> list[AllocatorSegment]:
    """The segments of torch's CUDA allocator, of all devices and pools; none where another took its place."""
    try:
        snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    except RuntimeError:  # an allocator that was plugged in keeps no such books
        return []
    return [
        AllocatorSegment(int(segment["address"]), int(segment["total_size"]), bool(segment.get("is_expandable", False)))
        for segment in snapshot
    ]


def _on_cuda(image: Image) -> bool:
    return any(device.type == "cuda" for device in image.devices)
