"""What is read in one go: extents that lie side by side in their blob, cut where they are long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rfork.image.host_memory import host_view
from rfork.storage.blob import Blob
from rfork.storage.io.staging import BUFFER_BYTES

MIN_BLOCK_BYTES = 4 << 20
"""Bytes under which a request costs more than it brings, even if streams stay idle."""
BLOCK_STEP = 1 << 20
GAP = 64 << 10
"""Bytes between two extents that are read with them, and thrown away: cheaper than one more read."""
CPU = torch.device("cpu")


class Extent(NamedTuple):
    """A run of a blob's bytes, and the memory they belong in.

    In host memory any dense tensor, whose `nbytes` bytes from `data_ptr` on are filled whatever its type and
    shape: 20,000 views as bytes take longer than a page cache takes to give what belongs in them. On
    another device uint8, 1-D, contiguous.
    """

    blob: Blob
    offset: int
    into: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Bytes `[begin, end)` of a blob that are read in one go, all for one device.

    They are those of the extents at `[first, stop)` in the plan's order; `wanted` bytes, without the gaps.
    """

    blob: Blob
    device: torch.device
    begin: int
    end: int
    wanted: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """Bytes of a block from `at` on: those `[begin, end)` of extent `index`."""

    at: int
    index: int
    begin: int
    end: int


class ReadPlan:
    """The extents of one `fill` in blocks: in the order of blobs, as they first come, and of offsets.

    Blocks end at multiples of `size` in their blob, so that most of them are aligned for any disk. An
    extent without bytes is in none. Takes about a microsecond an extent, as there may be many.
    """

    def __init__(self, extents: Sequence[Extent], size: int) -> None:
        self._extents = extents
        self._size = size
        self._offsets = [offset for _, offset, _ in extents]
        self._lengths = [into.nbytes for _, _, into in extents]
        rank: dict[int, int] = {}
        keys: list[tuple[int, int]] = []
        last, turn = None, 0
        for blob, offset, _ in extents:
            if blob is not last:
                last, turn = blob, rank.setdefault(id(blob), len(rank))
            keys.append((turn, offset))
        # Without those that have no bytes: a chain of them would bridge a gap of any length.
        filled = [index for index, length in enumerate(self._lengths) if length]
        self._order = sorted(filled, key=keys.__getitem__)
        self._unwanted = torch.empty(GAP, dtype=torch.uint8)

    def blocks(self) -> Iterator[ReadBlock]:
        """The blocks; each is worked out when it is asked for."""
        blob: Blob | None = None
        device = CPU
        begin = at = limit = wanted = first = 0
        for position, index in enumerate(self._order):
            extent, offset, length = self._extents[index], self._offsets[index], self._lengths[index]
            end = offset + length
            if not (extent.blob is blob and at <= offset <= at + GAP and offset < limit) or (
                not (extent.into.is_cpu and device is CPU) and extent.into.device != device
            ):
                if blob is not None and at > begin:
                    yield ReadBlock(blob, device, begin, at, wanted, first, position)
                blob, begin, first, wanted = extent.blob, offset, position, 0
                device = CPU if extent.into.is_cpu else extent.into.device
                limit = (offset // self._size + 1) * self._size
            wanted += length
            while end > limit:
                yield ReadBlock(extent.blob, device, begin, limit, wanted - (end - limit), first, position + 1)
                begin, first, wanted = limit, position, end - limit
                limit += self._size
            at = end
        if blob is not None and at > begin:
            yield ReadBlock(blob, device, begin, at, wanted, first, len(self._order))

    def pieces(self, block: ReadBlock) -> Iterator[BlockPiece]:
        """What is wanted of a block, in order."""
        for index in self._order[block.first : block.stop]:
            offset, length = self._offsets[index], self._lengths[index]
            begin, end = max(block.begin - offset, 0), min(block.end - offset, length)
            if end > begin:
                yield BlockPiece(offset + begin - block.begin, index, begin, end)

    def host_views(self, block: ReadBlock) -> list[memoryview]:
        """The memory of a block on the CPU, in order, and some for its gaps; neighbours are one."""
        views: list[memoryview] = []
        start = stop = 0
        done = block.begin
        for index in self._order[block.first : block.stop]:
            offset, length = self._offsets[index], self._lengths[index]
            end = offset + length
            address = self._extents[index].into.data_ptr()
            if offset < done:
                address, length = address + done - offset, end - done
            elif offset > done:
                if stop > start:
                    views.append(host_view(start, stop - start))
                start = stop = 0
                if offset - done > self._unwanted.numel():
                    raise ValueError(f"a gap of {offset - done} bytes within a block")
                views.append(host_view(self._unwanted.data_ptr(), offset - done))
            if end > block.end:
                length, end = length - (end - block.end), block.end
            if address != stop:
                if stop > start:
                    views.append(host_view(start, stop - start))
                start = address
            stop, done = address + length, end
        views.append(host_view(start, stop - start))
        return views

    def pieces_in(self, block: ReadBlock) -> tuple[list[int], list[tuple[int, int, int]]]:
        """The extents that have all their bytes in a block; and of each other its bytes here, and in all."""
        complete = self._order[block.first : block.stop]
        parts: list[tuple[int, int, int]] = []
        for index in {complete[0], complete[-1]}:
            offset, length = self._offsets[index], self._lengths[index]
            here = min(block.end, offset + length) - max(block.begin, offset)
            if here < length:
                complete.remove(index)
                parts.append((index, here, length))
        return complete, parts


def block_bytes(total: int, streams: int, max_bytes: int = BUFFER_BYTES) -> int:
    """The most bytes of a block: so that all streams have some, and a multiple of every alignment."""
    share = -(-total // streams // BLOCK_STEP) * BLOCK_STEP
    return min(max_bytes // BLOCK_STEP * BLOCK_STEP, BUFFER_BYTES, max(MIN_BLOCK_BYTES, share))
