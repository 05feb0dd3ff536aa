"""Which copies fill an image range: pure functions over two address maps. Runs on the target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rfork.errors import SourceCorrupt
from rfork.transport.cuda_ipc.allocations import AllocationTable
from rfork.transport.mooncake.read_plan import ContiguousPiece


class PlannedCopy(NamedTuple):
    """One copy: from `offset` of the source's allocation number `allocation` to address `local`, by `device`."""

    allocation: int
    offset: int
    local: int
    length: int
    device: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What fills a range: copies, and the image ranges that the source has in host memory."""

    copies: tuple[PlannedCopy, ...]
    on_host: tuple[tuple[int, int], ...]

    @property
    def allocations_needed(self) -> dict[int, list[int]]:
        """The source's allocations that each device of this side has to have opened."""
        found: dict[int, dict[int, None]] = {}
        for step in self.copies:
            found.setdefault(step.device, {})[step.allocation] = None
        return {device: list(areas) for device, areas in found.items()}


def plan_copies(
    pieces: Iterable[ContiguousPiece], begin: int, source: AllocationTable, target: AllocationTable
) -> CopyPlan:
    """The copies of `pieces`, which are those of an image range from `begin` on, in image order.

    What goes on on both sides, inside one allocation each, is one copy: an allocator puts tensors side by
    side, and each copy costs some µs. `target` are this side's allocations; where a piece of host memory here
    is filled from a device there, the first of them does it.
    """
    copies: list[PlannedCopy] = []
    on_host: list[tuple[int, int]] = []
    lands_in: int | None = None
    for remote, local, length in ((piece.remote, piece.local, piece.length) for piece in pieces):
        index = source.index(remote)
        if index is None:
            if on_host and on_host[-1][1] == begin:
                on_host[-1] = (on_host[-1][0], begin + length)
            else:
                on_host.append((begin, begin + length))
            begin += length
            continue
        begin += length
        landing = target.index(local)
        device = target.table[landing or 0].device
        while length:
            if index is None:
                raise SourceCorrupt(f"the source's address map goes beyond its allocations at {remote:#x}")
            allocation = source.table[index]
            run, offset = min(length, allocation.end - remote), remote - allocation.base
            last = copies[-1] if copies else None
            if (
                last is not None
                and (last.allocation, last.offset + last.length) == (index, offset)
                and last.local + last.length == local
                and landing is not None
                and landing == lands_in
            ):
                copies[-1] = last._replace(length=last.length + run)
            else:
                copies.append(PlannedCopy(index, offset, local, run, device))
            lands_in = landing
            remote, local, length = remote + run, local + run, length - run
            index = source.index(remote) if length else None
    return CopyPlan(tuple(copies), tuple(on_host))
