"""Plans reads: merges adjacent extents of a blob into blocks and splits long ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rfork.cuda.device import device_of
from rfork.image.host_memory import host_view
from rfork.image.staging import BUFFER_BYTES, CPU
from rfork.storage.blob import Blob

MIN_BLOCK_BYTES = 4 << 20
"""Minimum block size: smaller requests cost more than they gain, even if streams stay idle."""
BLOCK_STEP = 1 << 20
MAX_GAP_BYTES = 64 << 10
"""Largest gap in bytes between two extents that is read and discarded: cheaper than another read."""


class Extent(NamedTuple):
    """A range of a blob and the memory to fill with it.

    In host memory, any dense tensor: the `nbytes` bytes from `data_ptr` are filled regardless of dtype and
    shape, because creating 20,000 byte views takes longer than copying their content from the page cache. On
    other devices, a contiguous 1-D uint8 tensor.
    """

    blob: Blob
    offset: int
    into: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Bytes `[begin, end)` of a blob that are read at a time, all for one device.

    They cover the extents `[first, stop)` in plan order; `wanted` is the number of bytes without gaps.
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
    """Bytes of a block starting at `at`: range `[begin, end)` of extent `index`."""

    at: int
    index: int
    begin: int
    end: int


class ReadPlan:
    """The extents of one `fill`, split into blocks, ordered by blob (first use) and offset.

    Blocks end at multiples of `size` in their blob, so that most are aligned for any disk. Empty extents
    belong to no block. Takes about a microsecond per extent, because there may be many.
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
        # Empty extents are dropped: a chain of them would bridge a gap of any length.
        filled = [index for index, length in enumerate(self._lengths) if length]
        self._order = sorted(filled, key=keys.__getitem__)
        self._unwanted = torch.empty(MAX_GAP_BYTES, dtype=torch.uint8)

    def blocks(self) -> Iterator[ReadBlock]:
        """Iterate over the blocks, computed lazily."""
        blob: Blob | None = None
        device = CPU
        begin = at = limit = wanted = first = 0
        for position, index in enumerate(self._order):
            extent, offset, length = self._extents[index], self._offsets[index], self._lengths[index]
            end = offset + length
            memory_device = device_of(extent.into)
            continues = extent.blob is blob and at <= offset <= at + MAX_GAP_BYTES and offset < limit
            if not continues or memory_device != device:
                if blob is not None and at > begin:
                    yield ReadBlock(blob, device, begin, at, wanted, first, position)
                blob, begin, first, wanted = extent.blob, offset, position, 0
                device = memory_device
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
        """Iterate over the wanted pieces of a block, in order."""
        for index in self._order[block.first : block.stop]:
            offset, length = self._offsets[index], self._lengths[index]
            begin, end = max(block.begin - offset, 0), min(block.end - offset, length)
            if end > begin:
                yield BlockPiece(offset + begin - block.begin, index, begin, end)

    def host_views(self, block: ReadBlock) -> list[memoryview]:
        """Return views of a CPU block's memory, in order, with scratch memory for its gaps; adjacent ones are
        merged.
        """
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
        """Return the extents that lie completely in a block, and for each other one: index, bytes in this
        block, total bytes.
        """
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
    """Return the block size: small enough to keep all streams busy, and a multiple of every alignment."""
    share = -(-total // streams // BLOCK_STEP) * BLOCK_STEP
    return min(max_bytes // BLOCK_STEP * BLOCK_STEP, BUFFER_BYTES, max(MIN_BLOCK_BYTES, share))
