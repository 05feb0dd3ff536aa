"""Plans the copies that fill an image range: pure functions over two address maps. Runs on the target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rfork.errors import SourceCorrupt
from rfork.transport.cuda_ipc.allocations import AllocationTable
from rfork.transport.mooncake.read_plan import ContiguousPiece


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
            if on_host and on_host[-1][1] == begin:
                on_host[-1] = (on_host[-1][0], begin + length)
            else:
                on_host.append((begin, begin + length))
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
