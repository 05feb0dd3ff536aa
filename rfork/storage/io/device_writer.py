"""Blocks on their way to a device: read into staging, copied from there while the next one is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rfork.image.host_memory import host_view
from rfork.storage.io.extents import Extent, ReadBlock, ReadPlan
from rfork.storage.io.staging import BUFFER_ALIGNMENT, BufferPool


class CopyHandle(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Wait until every byte is in its place, and none of the source is read any more."""
        ...


class BlockCopier(Protocol):
    """Copies staging to devices; thread-safe."""

    def read(self, block: ReadBlock, pieces: Sequence[tuple[int, torch.Tensor]]) -> bool:
        """Read a block's pieces (offsets in the blob, memory) into their device without staging; False where
        that is not possible."""
        ...

    def copy(self, into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> CopyHandle:
        """Begin to copy each source to its place, all of one device; uint8, 1-D, of like lengths."""
        ...

    def close(self) -> None:
        """Close what is open; no copy is under way any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Pending:
    block: ReadBlock
    buffer: torch.Tensor
    arrival: CopyHandle


class DeviceWriter:
    """The blocks of one thread; it has at most two buffers: one is copied while the other is read into.

    `on_landed` is told each block that is in its place. A buffer is not given back, nor read into again,
    before its copy has ended.
    """

    def __init__(
        self,
        plan: ReadPlan,
        extents: Sequence[Extent],
        staging: BufferPool,
        copier: BlockCopier,
        on_landed: Callable[[ReadBlock], None],
    ) -> None:
        self._plan = plan
        self._extents = extents
        self._staging = staging
        self._copier = copier
        self._on_landed = on_landed
        self._pending: _Pending | None = None

    def load(self, block: ReadBlock) -> None:
        """Read a block and begin to copy it; the one before has landed then."""
        pieces = list(self._plan.pieces(block))
        wanted = [self._extents[piece.index].into[piece.begin : piece.end] for piece in pieces]
        offsets = [block.begin + piece.at for piece in pieces]
        if self._copier.read(block, list(zip(offsets, wanted, strict=True))):
            self._on_landed(block)
            return
        buffer = self._buffer()
        try:
            # Aligned like the blob: a local disk writes into it by itself.
            block_view = buffer[block.begin % BUFFER_ALIGNMENT :][: block.end - block.begin]
            block.blob.read(block.begin, [host_view(block_view.data_ptr(), block_view.numel())])
            sources = [block_view[piece.at : piece.at + piece.end - piece.begin] for piece in pieces]
            arrival = self._copier.copy(wanted, sources)
        except BaseException:
            self._staging.release(buffer)
            raise
        before, self._pending = self._pending, _Pending(block, buffer, arrival)
        self._complete_pending(before)

    def flush(self) -> None:
        """Wait until the last block has landed."""
        before, self._pending = self._pending, None
        self._complete_pending(before)

    def cancel(self) -> None:
        """Wait for a copy under way, and tell nobody."""
        before, self._pending = self._pending, None
        if before is not None:
            self._release(before)

    def _buffer(self) -> torch.Tensor:
        buffer = self._staging.try_acquire()
        if buffer is not None:
            return buffer
        # All are in use, one of them perhaps here: waiting with it in hand could be for ever.
        self.flush()
        return self._staging.acquire()

    def _complete_pending(self, pending: _Pending | None) -> None:
        if pending is not None:
            self._release(pending)
            self._on_landed(pending.block)

    def _release(self, pending: _Pending) -> None:
        try:
            pending.arrival.wait()
        finally:
            # Where the device fails, its memory is lost anyway; others still wait for the buffer.
            self._staging.release(pending.buffer)
