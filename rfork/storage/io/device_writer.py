"""Transfers blocks to a device: reads into one staging buffer while the previous one is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rfork.image.host_memory import host_view
from rfork.image.staging import BUFFER_ALIGNMENT, BufferPool, DeviceCopier, PendingCopy
from rfork.storage.io.extents import Extent, ReadBlock, ReadPlan
from rfork.storage.io.gds import DirectStorage


@dataclass(frozen=True, slots=True)
class _Pending:
    block: ReadBlock
    buffer: torch.Tensor
    arrival: PendingCopy


class DeviceWriter:
    """Transfers the blocks of one thread, with at most two buffers: one is copied while the other is filled.

    `on_landed` is called for each block whose copy is complete. A buffer is only released or reused after its
    copy has ended.
    """

    def __init__(
        self,
        plan: ReadPlan,
        extents: Sequence[Extent],
        staging: BufferPool,
        copier: DeviceCopier,
        direct_storage: DirectStorage | None,
        on_landed: Callable[[ReadBlock], None],
    ) -> None:
        self._plan = plan
        self._extents = extents
        self._staging = staging
        self._copier = copier
        self._direct_storage = direct_storage
        self._on_landed = on_landed
        self._pending: _Pending | None = None

    def load(self, block: ReadBlock) -> None:
        """Read a block and start copying it; the previous one is complete when this returns."""
        pieces = list(self._plan.pieces(block))
        wanted = [self._extents[piece.index].into[piece.begin : piece.end] for piece in pieces]
        offsets = [block.begin + piece.at for piece in pieces]
        direct = self._direct_storage
        if direct is not None and direct.read(block, list(zip(offsets, wanted, strict=True))):
            self._on_landed(block)
            return
        buffer = self._buffer()
        try:
            # Aligned like the blob, so that a local disk can write to it directly.
            block_view = buffer[block.begin % BUFFER_ALIGNMENT :][: block.end - block.begin]
            block.blob.read(block.begin, [host_view(block_view.data_ptr(), block_view.numel())])
            sources = [block_view[piece.at : piece.at + piece.end - piece.begin] for piece in pieces]
            arrival = self._copier.host_to_device(wanted, sources)
        except BaseException:
            self._staging.release(buffer)
            raise
        before, self._pending = self._pending, _Pending(block, buffer, arrival)
        self._complete_pending(before)

    def flush(self) -> None:
        """Wait until the last block is complete."""
        before, self._pending = self._pending, None
        self._complete_pending(before)

    def cancel(self) -> None:
        """Wait for the copy in progress without calling `on_landed`."""
        before, self._pending = self._pending, None
        if before is not None:
            self._release(before)

    def _buffer(self) -> torch.Tensor:
        buffer = self._staging.try_acquire()
        if buffer is not None:
            return buffer
        # All buffers are in use, possibly one by this thread: waiting without releasing it could deadlock.
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
            # If the device fails, its memory is lost anyway; other threads still need the buffer.
            self._staging.release(pending.buffer)
