"""Device allocations that contain an image, and the copies between those of two processes. For both sides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rfork.cuda.library import DriverError
from rfork.errors import SourceCorrupt, TransportUnavailable
from rfork.image.memory import Image, Segment
from rfork.transport.cuda_ipc.driver import Allocation, IpcDriver
from rfork.transport.mooncake.read_plan import ContiguousPiece

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


def allocations_of(driver: IpcDriver, image: Image) -> AllocationTable:
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


def shareable_allocations(driver: IpcDriver, image: Image) -> AllocationTable:
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
        if allocations.index(address) is None:
            _add_range(found, begin, begin + length)
    return found


def _add_range(ranges: list[tuple[int, int]], begin: int, end: int) -> None:
    """Append a range, or extend the last one if it is adjacent."""
    if ranges and ranges[-1][1] == begin:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((begin, end))


class PlannedCopy(NamedTuple):
    """One copy: from `offset` in the source's allocation `allocation` to address `local`, run by `device`."""

    allocation: int
    offset: int
    local: int
    length: int
    device: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies that fill a range, and the image ranges that are in the source's host memory."""

    copies: tuple[PlannedCopy, ...]
    on_host: tuple[tuple[int, int], ...]

    @property
    def allocations_needed(self) -> dict[int, list[int]]:
        """The source's allocations that each device of the target must open."""
        found: dict[int, dict[int, None]] = {}
        for copy in self.copies:
            found.setdefault(copy.device, {})[copy.allocation] = None
        return {device: list(allocations) for device, allocations in found.items()}


def plan_copies(
    pieces: Iterable[ContiguousPiece], begin: int, source: AllocationTable, target: AllocationTable
) -> CopyPlan:
    """Plan the copies for `pieces` of an image range that starts at `begin`, in image order.

    Bytes that are contiguous within one allocation on both sides become one copy: allocators place tensors
    side by side, and each copy costs a few µs. `target` are the target's allocations; host memory of the
    target is filled by the device of the first.
    """
    copies: list[PlannedCopy] = []
    on_host: list[tuple[int, int]] = []
    last_target: int | None = None
    for remote, local, length in ((piece.remote, piece.local, piece.length) for piece in pieces):
        index = source.index(remote)
        if index is None:
            _add_range(on_host, begin, begin + length)
            begin += length
            continue
        begin += length
        target_index = target.index(local)
        device = target.table[target_index or 0].device
        while length:
            if index is None:
                raise SourceCorrupt(f"the source's address map exceeds its allocations at {remote:#x}")
            allocation = source.table[index]
            run, offset = min(length, allocation.end - remote), remote - allocation.base
            last = copies[-1] if copies else None
            if (
                last is not None
                and (last.allocation, last.offset + last.length) == (index, offset)
                and last.local + last.length == local
                and target_index is not None
                and target_index == last_target
            ):
                copies[-1] = last._replace(length=last.length + run)
            else:
                copies.append(PlannedCopy(index, offset, local, run, device))
            last_target = target_index
            remote, local, length = remote + run, local + run, length - run
            index = source.index(remote) if length else None
    return CopyPlan(tuple(copies), tuple(on_host))
