"""Plans reads: merges adjacent extents of a blob into blocks and splits long ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Self

from rfork.cuda.device import device_of
from rfork.image.host_memory import host_view
from rfork.image.staging import BUFFER_BYTES, CPU
from rfork.storage.blob import Blob

Column = npt.NDArray[np.int64]
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


class ExtentTable(Sequence[Extent]):
    """Extents as columns, because there may be many: one for each tensor of a model.

    Extent `i` is `lengths[i]` bytes of `blobs[blob_of[i]]` from `offsets[i]`, for the memory from `addresses[i]` on
    `devices[device_of[i]]`. `memory` are the tensors themselves, which also keep the memory alive.
    """

    def __init__(
        self,
        blobs: Sequence[Blob],
        blob_of: Sequence[int] | Column,
        offsets: Sequence[int] | Column,
        memory: Sequence[torch.Tensor],
        lengths: Sequence[int] | Column,
        addresses: Sequence[int] | Column,
        devices: Sequence[torch.device] = (CPU,),
        device_of: Sequence[int] | Column | None = None,
    ) -> None:
        """Without `device_of`, all extents are on the first device."""
        self.blobs = blobs
        self.memory = memory
        self.devices = devices
        self.blob_of: Column = np.asarray(blob_of, dtype=np.int64)
        self.offsets: Column = np.asarray(offsets, dtype=np.int64)
        self.lengths: Column = np.asarray(lengths, dtype=np.int64)
        self.addresses: Column = np.asarray(addresses, dtype=np.int64)
        self.device_of: Column = (
            np.zeros(len(memory), dtype=np.int64) if device_of is None else np.asarray(device_of, dtype=np.int64)
        )

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> Self:
        """Return a table of these extents."""
        memory = [into for _, _, into in extents]
        blob_numbers: dict[int, int] = {}
        blobs: list[Blob] = []
        blob_of: list[int] = []
        device_numbers: dict[torch.device, int] = {}
        for extent in extents:
            number = blob_numbers.setdefault(id(extent.blob), len(blobs))
            if number == len(blobs):
                blobs.append(extent.blob)
            blob_of.append(number)
        return cls(
            blobs,
            blob_of,
            [offset for _, offset, _ in extents],
            memory,
            [into.nbytes for into in memory],
            [into.data_ptr() for into in memory],
            device_of=[device_numbers.setdefault(device_of(into), len(device_numbers)) for into in memory],
            devices=tuple(device_numbers),
        )

    @overload
    def __getitem__(self, index: int) -> Extent: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Extent]: ...

    def __getitem__(self, index: int | slice) -> Extent | Sequence[Extent]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return Extent(self.blobs[int(self.blob_of[index])], int(self.offsets[index]), self.memory[index])

    def __len__(self) -> int:
        return len(self.memory)


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
    belong to no block.
    """

    def __init__(self, extents: Sequence[Extent], size: int) -> None:
        table = extents if isinstance(extents, ExtentTable) else ExtentTable.of(extents)
        self._table = table
        self._size = size
        # Empty extents are dropped: a chain of them would bridge a gap of any length.
        filled = np.flatnonzero(table.lengths)
        order = filled[np.lexsort((table.offsets[filled], table.blob_of[filled]))]
        self._order: Column = order
        self._begins: Column = table.offsets[order]
        self._lengths: Column = table.lengths[order]
        self._ends: Column = self._begins + self._lengths
        self._addresses: Column = table.addresses[order]
        self._unwanted = torch.empty(MAX_GAP_BYTES, dtype=torch.uint8)

    def blocks(self) -> Iterator[ReadBlock]:
        """Iterate over the blocks, computed lazily."""
        table, order, size = self._table, self._order, self._size
        if not len(order):
            return
        blob_of, on_device = table.blob_of[order], table.device_of[order]
        gaps = self._begins[1:] - self._ends[:-1]
        breaks = (blob_of[1:] != blob_of[:-1]) | (on_device[1:] != on_device[:-1]) | (gaps < 0) | (gaps > MAX_GAP_BYTES)
        starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(order)]
        for start, stop in pairwise(starts):
            begins, ends = self._begins[start:stop].tolist(), self._ends[start:stop].tolist()
            bytes_before = np.cumsum(self._lengths[start:stop]).tolist()
            blob, device = table.blobs[int(blob_of[start])], table.devices[int(on_device[start])]
            first, begin, done = 0, begins[0], 0
            while True:
                limit = (begin // size + 1) * size
                last = bisect_left(begins, limit, first) - 1  # the last extent that begins before the limit
                end = min(limit, ends[last])
                wanted = bytes_before[last] - (ends[last] - end)
                yield ReadBlock(blob, device, begin, end, wanted - done, start + first, start + last + 1)
                done = wanted
                first = last if end < ends[last] else last + 1
                if first == stop - start:
                    break
                begin = max(end, begins[first])

    def pieces(self, block: ReadBlock) -> Iterator[BlockPiece]:
        """Iterate over the wanted pieces of a block, in order."""
        part = slice(block.first, block.stop)
        for index, offset, length in zip(
            self._order[part].tolist(), self._begins[part].tolist(), self._lengths[part].tolist(), strict=True
        ):
            begin, end = max(block.begin - offset, 0), min(block.end - offset, length)
            if end > begin:
                yield BlockPiece(offset + begin - block.begin, index, begin, end)

    def host_views(self, block: ReadBlock) -> list[memoryview]:
        """Return views of a CPU block's memory, in order, with scratch memory for its gaps; adjacent ones are
        merged.
        """
        part = slice(block.first, block.stop)
        begins = np.maximum(self._begins[part], block.begin)
        ends = np.minimum(self._ends[part], block.end)
        addresses = self._addresses[part] + (begins - self._begins[part])
        gaps = begins[1:] - ends[:-1]
        if len(gaps) and int(gaps.max()) > self._unwanted.numel():
            raise ValueError(f"a gap of {int(gaps.max())} bytes within a block")
        # A view ends where the next extent is not the next in the blob and in memory.
        last = np.flatnonzero((gaps > 0) | (addresses[1:] != addresses[:-1] + (ends - begins)[:-1]))
        first = np.concatenate(([0], last + 1))
        last = np.concatenate((last, [len(begins) - 1]))
        starts, lengths = addresses[first].tolist(), (ends[last] - begins[first]).tolist()
        if not gaps.any():
            return list(map(host_view, starts, lengths))
        unwanted = [*gaps[last[:-1]].tolist(), 0]
        views: list[memoryview] = []
        for start, length, gap in zip(starts, lengths, unwanted, strict=True):
            views.append(host_view(start, length))
            if gap:
                views.append(host_view(self._unwanted.data_ptr(), gap))
        return views

    def pieces_in(self, block: ReadBlock) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Return the extents that lie completely in a block, and for each other one: index, bytes in this
        block, total bytes.
        """
        complete: list[int] = self._order[block.first : block.stop].tolist()
        parts: list[tuple[int, int, int]] = []
        for position in {block.first, block.stop - 1}:
            index, offset, end = (int(column[position]) for column in (self._order, self._begins, self._ends))
            here = min(block.end, end) - max(block.begin, offset)
            if here < end - offset:
                complete.remove(index)
                parts.append((index, here, end - offset))
        return complete, parts


def block_bytes(total: int, streams: int, max_bytes: int = BUFFER_BYTES) -> int:
    """Return the block size: small enough to keep all streams busy, and a multiple of every alignment."""
    share = -(-total // streams // BLOCK_STEP) * BLOCK_STEP
    return min(max_bytes // BLOCK_STEP * BLOCK_STEP, BUFFER_BYTES, max(MIN_BLOCK_BYTES, share))
