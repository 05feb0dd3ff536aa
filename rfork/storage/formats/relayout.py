"""Fills tensors whose dtype or memory layout differs from the stored one, using bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rfork.image.host_memory import host_view
from rfork.image.layout import contiguous_stride
from rfork.image.staging import BUFFER_ALIGNMENT, BufferPool, allocate_host
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob
from rfork.storage.formats.safetensors_file import TensorLocation
from rfork.storage.io.reader_threads import ReaderThreads
from rfork.storage.local import LocalFile

RUN_BYTES = 4 << 20
"""Bytes that a thread reads before it converts them: they are still in its cache then."""
MIN_MEMORY = 16 << 20


def is_bytewise(location: TensorLocation, dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Return True if the stored bytes equal those of a tensor with this dtype, in one contiguous run."""
    if location.dtype is not dtype:
        return False
    if location.stride is None:
        return tensor.is_contiguous()
    return location.stride == tensor.stride() and location.nbytes == tensor.numel() * dtype.itemsize


def fill_converted(
    pairs: Sequence[tuple[TensorLocation, torch.Tensor]],
    gap: int,
    settings: StorageSettings,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill tensors of the stored shape, sorted by blob and offset, each as its bytes arrive.

    Uses at most half of `settings.staging_bytes`, and more for each non-contiguous stored tensor that is larger than
    `RUN_BYTES`. Raises the same errors as `rfork.storage.io.reader.fill`.
    """
    if pairs:
        _ConvertJob(pairs, gap, settings, progress).run()


@dataclass(frozen=True, slots=True)
class _ConvertPiece:
    """Stored bytes, contiguous or strided, and the tensor (or part of one) to fill with them."""

    blob: Blob
    offset: int
    nbytes: int
    dtype: torch.dtype
    stride: tuple[int, ...]
    target: torch.Tensor

    def copy(self, memory: torch.Tensor) -> None:
        """Convert the bytes of this piece, which are in `memory`, into the target."""
        if int(memory.storage_offset()) % self.dtype.itemsize:
            memory = memory.clone()  # the tensor is not aligned in its file
        self.target.copy_(memory.view(self.dtype).as_strided(self.target.shape, self.stride))


@dataclass(slots=True)
class _FileRun:
    """File range `[begin, end)` of one blob that contains all `pieces`."""

    begin: int
    end: int
    pieces: list[_ConvertPiece]

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """Read the run into a buffer with `BUFFER_ALIGNMENT`, and return the part of the buffer with its bytes."""
        blob, first = self.pieces[0].blob, self.begin % BUFFER_ALIGNMENT
        if isinstance(blob, LocalFile):
            # Complete pages: a direct read of parts of them needs two more reads.
            begin, end = self.begin - first, min(-(-self.end // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT, blob.size)
        else:
            begin, end = self.begin, self.end
        blob.read(begin, [host_view(buffer.data_ptr() + begin % BUFFER_ALIGNMENT, end - begin)])
        return buffer[first : first + self.end - self.begin]


def _pieces(pairs: Iterable[tuple[TensorLocation, torch.Tensor]], max_bytes: int) -> Iterator[_ConvertPiece]:
    for location, tensor in pairs:
        target = tensor.detach()
        if location.stride is None:
            yield from _split_tensor(location, target, location.offset, max_bytes)
        else:
            yield _ConvertPiece(
                location.blob, location.offset, location.nbytes, location.dtype, location.stride, target
            )


def _split_tensor(
    location: TensorLocation, target: torch.Tensor, offset: int, max_bytes: int
) -> Iterator[_ConvertPiece]:
    """Split a contiguous stored tensor into pieces of at most `max_bytes` bytes."""
    nbytes = target.numel() * location.dtype.itemsize
    if nbytes <= max_bytes or not target.dim():
        stride = contiguous_stride(target.shape)
        yield _ConvertPiece(location.blob, offset, nbytes, location.dtype, stride, target)
        return
    row = nbytes // target.shape[0]
    step = max(1, max_bytes // row)
    for first in range(0, target.shape[0], step):
        part = target[first] if row > max_bytes else target[first : first + step]
        yield from _split_tensor(location, part, offset + first * row, max_bytes)


def _runs(pieces: Iterable[_ConvertPiece], gap: int, max_bytes: int) -> Iterator[_FileRun]:
    run: _FileRun | None = None
    for piece in pieces:
        end = piece.offset + piece.nbytes
        if run is not None and (
            piece.blob is run.pieces[0].blob
            # A tied tensor begins again before the last run of the one with the same bytes.
            and run.begin <= piece.offset <= run.end + gap
            and max(end, run.end) - run.begin <= max_bytes
        ):
            run.pieces.append(piece)
            run.end = max(end, run.end)
            continue
        if run is not None:
            yield run
        run = _FileRun(piece.offset, end, [piece])
    if run is not None:
        yield run


class _ConvertJob:
    """State of one `fill_converted` call."""

    def __init__(
        self,
        pairs: Sequence[tuple[TensorLocation, torch.Tensor]],
        gap: int,
        settings: StorageSettings,
        progress: Callable[[int], None] | None,
    ) -> None:
        memory = max(MIN_MEMORY, settings.staging_bytes // 2)
        self._buffers = BufferPool(memory, RUN_BYTES + 2 * BUFFER_ALIGNMENT)
        max_runs = len(pairs) + sum(location.nbytes for location, _ in pairs) // RUN_BYTES
        self._streams = min(settings.concurrency, memory // self._buffers.buffer_bytes, max_runs)
        self._progress = progress
        self._progress_lock = threading.Lock()
        blobs = {id(location.blob): location.blob for location, _ in pairs}
        self._threads = ReaderThreads(_runs(_pieces(pairs, RUN_BYTES), gap, RUN_BYTES), blobs.values())

    def run(self) -> None:
        self._threads.run(self._streams, self._work, self._buffers.close)

    def _work(self) -> None:
        with self._buffers.lease() as buffer:
            while (run := self._threads.next()) is not None:
                fits = run.end - run.begin <= RUN_BYTES
                self._convert(run, buffer if fits else allocate_host(run.end - run.begin + 2 * BUFFER_ALIGNMENT))

    def _convert(self, run: _FileRun, buffer: torch.Tensor) -> None:
        memory = run.read(buffer)
        if self._threads.abandoned:
            return
        # Parameters are written in place, inference tensors too, on the calling engine's thread.
        with torch.inference_mode():
            for piece in run.pieces:
                first = piece.offset - run.begin
                piece.copy(memory[first : first + piece.nbytes])
        if self._progress is not None:
            with self._progress_lock:
                self._progress(sum(piece.nbytes for piece in run.pieces))
