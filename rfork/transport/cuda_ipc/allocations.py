"""Device allocations that contain an image; another process opens memory by allocation. For both sides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from rfork.errors import SourceCorrupt, TransportUnavailable
from rfork.image.memory import Image, Segment
from rfork.transport.cuda_ipc.driver import Allocation, Driver, DriverError

MAX_ALLOCATIONS = 1 << 17
"""Limit per image: 2 TB in expandable segments of 20 MiB. A table of this size has 4 MB."""

_NOT_SHAREABLE_HINT = (
    "use torch's default allocator without sleep mode and without backend:cudaMallocAsync; "
    "with expandable_segments, unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0 and use torch 2.6 or newer"
)


class AllocationTable:
    """Non-overlapping allocations sorted by address. Addresses outside all of them are host memory.

    Raises SourceCorrupt for an invalid table.
    """

    def __init__(self, table: Sequence[Allocation]) -> None:
        min_base = 1
        for allocation in table:
            if allocation.base < min_base or allocation.size <= 0:
                raise SourceCorrupt(f"the source's allocation at {allocation.base:#x} overlaps another or is invalid")
            min_base = allocation.end
        self.table = tuple(table)
        self._bases = [allocation.base for allocation in table]

    def index(self, address: int) -> int | None:
        """Return the index of the allocation that contains an address; None for host memory."""
        index = bisect_right(self._bases, address) - 1
        return index if index >= 0 and address < self.table[index].end else None

    @property
    def devices(self) -> list[int]:
        """Devices of the allocations, sorted."""
        return sorted({allocation.device for allocation in self.table})


def allocations_of(driver: Driver, image: Image) -> AllocationTable:
    """Return the device allocations that contain `image`. Raises DriverError.

    Queries the driver once per allocation: torch puts many tensors into one.
    """
    regions = image.regions
    on_devices: list[tuple[int, int, int]] = []
    for address, length, storage in zip(regions.addresses, regions.lengths, regions.storages, strict=True):
        if length and (device := driver.device_of(storage)) is not None:
            on_devices.append((address, length, device))
    found: list[Allocation] = []
    for address, length, device in sorted(on_devices):
        at, end = address, address + length
        # With expandable segments a tensor may span several adjacent allocations.
        while at < end:
            if not found or at >= found[-1].end:
                found.append(driver.allocation(device, at))
            at = found[-1].end
    return AllocationTable(found)


def shareable_allocations(driver: Driver, image: Image) -> AllocationTable:
    """Return the allocations of the source's image. Raises TransportUnavailable if there are none or they
    cannot be shared.
    """
    try:
        allocations = allocations_of(driver, image)
    except DriverError as error:
        raise TransportUnavailable(f"the driver does not recognize the image's memory: {error}") from error
    if not allocations.table:
        raise TransportUnavailable(
            "the image has no bytes on a GPU", hint="use shared_memory for weights in host memory"
        )
    if len(allocations.table) > MAX_ALLOCATIONS:
        raise TransportUnavailable(
            f"the image has {len(allocations.table)} allocations; the limit is {MAX_ALLOCATIONS}"
        )
    not_shareable = [allocation for allocation in allocations.table if allocation.handle_type == "none"]
    if not_shareable:
        raise TransportUnavailable(
            f"{len(not_shareable)} of the image's {len(allocations.table)} allocations are not shareable",
            hint=_NOT_SHAREABLE_HINT,
        )
    return allocations


def host_ranges(allocations: AllocationTable, segments: Iterator[Segment] | Sequence[Segment]) -> list[tuple[int, int]]:
    """Return the image ranges of those `segments` of the source that are in host memory; adjacent ranges are
    joined.
    """
    found: list[tuple[int, int]] = []
    for begin, address, length in segments:
        if allocations.index(address) is not None:
            continue
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], begin + length)
        else:
            found.append((begin, begin + length))
    return found
