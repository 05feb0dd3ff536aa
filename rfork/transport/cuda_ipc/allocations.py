"""Which allocations hold an image: the few things that one process opens of another one. For both sides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from rfork.errors import SourceCorrupt, TransportUnavailable
from rfork.image.memory import Image, Segment
from rfork.transport.cuda_ipc.driver import Allocation, Driver, DriverError

MAX_ALLOCATIONS = 1 << 17
"""Of one image: 2 TB in expandable segments of 20 MiB; a table of so many has 4 MB."""

_NOT_SHARED = (
    "use torch's own allocator without sleep mode or backend:cudaMallocAsync; "
    "with expandable_segments unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0, and have torch 2.6 or newer"
)


class AllocationTable:
    """Allocations sorted by address, none over another. Addresses in none of them are host memory.

    Raises SourceCorrupt for what is no such table.
    """

    def __init__(self, table: Sequence[Allocation]) -> None:
        reached = 1
        for allocation in table:
            if allocation.base < reached or allocation.size <= 0:
                raise SourceCorrupt(f"the source's allocation at {allocation.base:#x} lies over another, or nowhere")
            reached = allocation.end
        self.table = tuple(table)
        self._bases = [allocation.base for allocation in table]

    def index(self, address: int) -> int | None:
        """The number of the allocation that an address lies in; None: it is one of host memory."""
        index = bisect_right(self._bases, address) - 1
        return index if index >= 0 and address < self.table[index].end else None

    @property
    def devices(self) -> list[int]:
        """The devices that any of them lie on."""
        return sorted({allocation.device for allocation in self.table})


def allocations_of(driver: Driver, image: Image) -> AllocationTable:
    """The allocations that hold `image` where it lies on devices. Raises DriverError.

    The driver is asked once for each: torch puts many tensors into one allocation.
    """
    regions = image.regions
    on_devices: list[tuple[int, int, int]] = []
    for address, length, storage in zip(regions.addresses, regions.lengths, regions.storages, strict=True):
        if length and (device := driver.device_of(storage)) is not None:
            on_devices.append((address, length, device))
    found: list[Allocation] = []
    for address, length, device in sorted(on_devices):
        at, end = address, address + length
        # A tensor may lie in several, one behind the other: in expandable segments.
        while at < end:
            if not found or at >= found[-1].end:
                found.append(driver.allocation(device, at))
            at = found[-1].end
    return AllocationTable(found)


def shareable_allocations(driver: Driver, image: Image) -> AllocationTable:
    """The same on the source. Raises TransportUnavailable where there are none, or they cannot be shown."""
    try:
        areas = allocations_of(driver, image)
    except DriverError as error:
        raise TransportUnavailable(f"the driver does not know the image's memory: {error}") from error
    if not areas.table:
        raise TransportUnavailable("no byte of the image lies on a GPU", hint="shared_memory is for host memory")
    if len(areas.table) > MAX_ALLOCATIONS:
        raise TransportUnavailable(f"the image lies in {len(areas.table)} allocations, more than {MAX_ALLOCATIONS}")
    hidden = [allocation for allocation in areas.table if allocation.handle_type == "none"]
    if hidden:
        raise TransportUnavailable(
            f"{len(hidden)} of the image's {len(areas.table)} allocations cannot be shown to another process",
            hint=_NOT_SHARED,
        )
    return areas


def host_ranges(areas: AllocationTable, segments: Iterator[Segment] | Sequence[Segment]) -> list[tuple[int, int]]:
    """The image ranges of those of the source's `segments` that lie in host memory, neighbours joined."""
    found: list[tuple[int, int]] = []
    for begin, address, length in segments:
        if areas.index(address) is not None:
            continue
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], begin + length)
        else:
            found.append((begin, begin + length))
    return found
