"""Groups stored tensors into blocks, each read into one allocation, and streams them as they arrive."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from rfork.image.layout import contiguous_stride
from rfork.image.staging import allocate_host
from rfork.settings import StorageSettings
from rfork.storage.formats.safetensors_file import TensorLocation
from rfork.storage.io.prefetch import POLL_INTERVAL_S
from rfork.storage.io.reader import Extent, fill
from rfork.storage.io.reader_threads import GRACE_S

MAX_ITEM_SIZE = 16
"""Largest item size in bytes."""

READERS = 2
"""Blocks read concurrently: the first requests of the next block overlap with the last of the current one."""
PREFETCH_BLOCKS = 4
"""Blocks that are being read or wait for the caller."""
MIN_MEMORY = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """File range `[begin, end)` of one blob that contains all `locations`; not empty."""

    begin: int
    end: int
    locations: Sequence[TensorLocation]

    def extent(self, device: torch.device | str) -> Extent:
        """Return the block's range with newly allocated memory for it."""
        return Extent(self.locations[0].blob, self.begin, _memory(self.end - self.begin, self.begin, device))


def group_into_blocks(
    locations: Iterable[TensorLocation], gap: int, max_bytes: int | None = None
) -> Iterator[TensorBlock]:
    """Group locations, sorted by blob and offset, into blocks of at most `max_bytes` bytes or one tensor.

    Gaps of up to `gap` bytes between two tensors are read along. Tensors that overlap stay in one block, so
    that they remain tied.
    """
    members: list[TensorLocation] = []
    begin = end = 0
    for location in locations:
        last = location.offset + location.nbytes
        if members and (
            location.blob is not members[0].blob
            or location.offset > end + gap
            or (max_bytes is not None and last - begin > max_bytes and location.offset >= end)
        ):
            yield TensorBlock(begin, end, members)
            members = []
        if not members:
            begin, end = location.offset, last
        members.append(location)
        end = max(end, last)
    if members:
        yield TensorBlock(begin, end, members)


def tensors_in(block: TensorBlock, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors of a block as views of its memory, without copying. Each must be `aligned`."""
    storage, shift = memory.untyped_storage(), int(memory.storage_offset()) - block.begin
    bases: dict[torch.dtype, torch.Tensor] = {}
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    for name, _, offset, _, dtype, shape, stride in block.locations:
        base = bases.get(dtype)
        if base is None:
            base = bases[dtype] = torch.empty(0, dtype=dtype, device=memory.device).set_(storage)
        if stride is None:
            stride = strides.get(shape)
            if stride is None:
                stride = strides[shape] = contiguous_stride(shape)
        yield name, base.as_strided(shape, stride, (shift + offset) // base.itemsize)


def aligned(location: TensorLocation) -> bool:
    """Return True if a tensor's offset is a multiple of its item size."""
    return location.offset % location.dtype.itemsize == 0


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's memory as 1-D uint8. Call with autograd disabled."""
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(storage, tensor.storage_offset() * tensor.itemsize, (tensor.nbytes,), (1,))


def _memory(nbytes: int, offset: int, device: torch.device | str) -> torch.Tensor:
    """Allocate uninitialised memory with the same alignment to pages and items as `offset` in the file."""
    shift = offset % MAX_ITEM_SIZE
    if torch.device(device).type == "cpu":
        return allocate_host(nbytes + shift, offset - shift)[shift:]
    return torch.empty(nbytes + shift, dtype=torch.uint8, device=device)[shift:]


class _ConsumerClosed(Exception):
    """The caller closed the stream."""


class _TensorStream:
    """Queue between reader threads and one consumer; bounds how far the readers are ahead."""

    def __init__(self, blocks: Iterator[TensorBlock], device: torch.device | str, settings: StorageSettings) -> None:
        self._blocks = blocks
        self._device = device
        self._settings = settings.model_copy(
            update={
                "concurrency": max(1, settings.concurrency // READERS),
                "staging_bytes": max(MIN_MEMORY, settings.staging_bytes // (2 * READERS)),
            }
        )
        self._changed = threading.Condition()
        self._ready: deque[tuple[TensorBlock, torch.Tensor]] = deque()
        self._error: BaseException | None = None
        self._readers = READERS
        self._stopped = False
        self._threads = [threading.Thread(target=self._run, name="rfork-stream", daemon=True) for _ in range(READERS)]

    def start(self) -> None:
        """Start reading. The caller must call `close`, even if this call is interrupted."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop reading. Reads that hang are abandoned together with their memory."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        until = time.monotonic() + 2 * GRACE_S
        for thread in self._threads:
            if thread.is_alive():  # not if its start was interrupted
                thread.join(max(0.0, until - time.monotonic()))

    def next_block(self) -> tuple[TensorBlock, torch.Tensor] | None:
        """Wait for a complete block; None at the end. Raises a reader's error."""
        with self._changed:
            while not self._ready and self._error is None and self._readers:
                # A signal that arrives just before an unbounded wait would not be handled.
                self._changed.wait(POLL_INTERVAL_S)
            if self._error is not None:
                raise self._error
            if not self._ready:
                return None
            self._changed.notify_all()
            return self._ready.popleft()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while (block := self._next()) is not None:
                extent = block.extent(self._device)
                fill([extent], self._settings, progress=self._check)
                with self._changed:
                    self._ready.append((block, extent.into))
                    self._changed.notify_all()
        except _ConsumerClosed:
            pass
        except BaseException as raised:  # re-raised in next_block()
            error = raised
        with self._changed:
            self._error = self._error or error
            self._readers -= 1
            self._changed.notify_all()

    def _next(self) -> TensorBlock | None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) <= PREFETCH_BLOCKS - READERS - 1 or self._stopped)
            if self._stopped or self._error is not None:
                return None
            return next(self._blocks, None)

    def _check(self, _: int) -> None:
        if self._stopped:
            raise _ConsumerClosed


def stream_tensors(
    blocks: Iterator[TensorBlock], device: torch.device | str, settings: StorageSettings
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors of blocks, each block in its own memory, as blocks complete.

    Reading begins with the first tensor requested and has ended when the iterator is exhausted or closed,
    unless storage hangs. Raises the errors of the reads.
    """
    with closing(_TensorStream(blocks, device, settings)) as arrivals:
        arrivals.start()
        while (arrived := arrivals.next_block()) is not None:
            with torch.no_grad():
                found = list(tensors_in(*arrived))
            del arrived  # only the tensors keep the memory alive
            yield from found
