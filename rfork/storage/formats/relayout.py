"""Stored tensors into tensors that are laid out otherwise, or of another type: by way of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rfork.image.strides import contiguous_stride
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob
from rfork.storage.formats.safetensors_file import TensorLocation
from rfork.storage.io import reader
from rfork.storage.io.reader import Extent

RUN_BYTES = 4 << 20
"""Bytes that are read before what they hold is converted; by several threads, each a run of its own."""
MIN_MEMORY = 16 << 20
MAX_ITEM_SIZE = 16
"""The widest item in bytes: what a run is aligned by, in its file and in memory."""


def is_bytewise(location: TensorLocation, dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor, were it of `dtype`, are those that are stored, in one run of memory."""
    if location.dtype is not dtype:
        return False
    if location.stride is None:
        return tensor.is_contiguous()
    return location.stride == tensor.stride() and location.nbytes == tensor.numel() * dtype.itemsize


def fill_converted(
    pairs: Iterable[tuple[TensorLocation, torch.Tensor]],
    gap: int,
    settings: StorageSettings,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill tensors with what is stored of the same shape, sorted by blob and offset, each as it comes.

    Takes half of `settings.memory`, and where a stored tensor that is not contiguous is larger, its size.
    Raises as `rfork.storage.io.reader.fill_converted` does.
    """
    half = max(MIN_MEMORY, settings.staging_bytes // 2)
    halved = settings.model_copy(update={"memory": half})
    scratch = torch.empty(0, dtype=torch.uint8)
    for batch in _batches(_runs(_pieces(pairs, min(RUN_BYTES, half)), gap, min(RUN_BYTES, half)), half):
        needed = sum(_scratch_bytes(run) for run in batch)
        if scratch.numel() < needed:
            scratch = torch.empty(needed, dtype=torch.uint8)
        _read(batch, scratch, halved, progress)


@dataclass(frozen=True, slots=True)
class _ConvertPiece:
    """Stored bytes, contiguous or as `stride` says, and the tensor (a part of one) that they are of."""

    blob: Blob
    offset: int
    nbytes: int
    dtype: torch.dtype
    stride: tuple[int, ...]
    target: torch.Tensor

    def copy(self, memory: torch.Tensor) -> None:
        """Convert what `memory` holds: the bytes of this piece."""
        if int(memory.storage_offset()) % self.dtype.itemsize:
            memory = memory.clone()  # the file does not align its tensors
        self.target.copy_(memory.view(self.dtype).as_strided(self.target.shape, self.stride))


@dataclass(slots=True)
class _FileRun:
    """File range `[begin, end)` of one blob, with all of `pieces`."""

    begin: int
    end: int
    pieces: list[_ConvertPiece]


def _pieces(pairs: Iterable[tuple[TensorLocation, torch.Tensor]], max_bytes: int) -> Iterator[_ConvertPiece]:
    for location, tensor in pairs:
        target = tensor.detach()
        if location.stride is None:
            yield from _cut(location, target, location.offset, max_bytes)
        else:
            yield _ConvertPiece(
                location.blob, location.offset, location.nbytes, location.dtype, location.stride, target
            )


def _cut(location: TensorLocation, target: torch.Tensor, offset: int, max_bytes: int) -> Iterator[_ConvertPiece]:
    """Parts of a contiguous stored tensor of at most `max_bytes` bytes."""
    nbytes = target.numel() * location.dtype.itemsize
    if nbytes <= max_bytes or not target.dim():
        stride = contiguous_stride(target.shape)
        yield _ConvertPiece(location.blob, offset, nbytes, location.dtype, stride, target)
        return
    row = nbytes // target.shape[0]
    step = max(1, max_bytes // row)
    for first in range(0, target.shape[0], step):
        part = target[first] if row > max_bytes else target[first : first + step]
        yield from _cut(location, part, offset + first * row, max_bytes)


def _runs(pieces: Iterable[_ConvertPiece], gap: int, max_bytes: int) -> Iterator[_FileRun]:
    run: _FileRun | None = None
    for piece in pieces:
        end = piece.offset + piece.nbytes
        if run is not None and (
            piece.blob is run.pieces[0].blob
            and piece.offset <= run.end + gap
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


def _batches(runs: Iterable[_FileRun], max_bytes: int) -> Iterator[list[_FileRun]]:
    batch: list[_FileRun] = []
    used = 0
    for run in runs:
        if batch and used + _scratch_bytes(run) > max_bytes:
            yield batch
            batch, used = [], 0
        batch.append(run)
        used += _scratch_bytes(run)
    if batch:
        yield batch


def _scratch_bytes(run: _FileRun) -> int:
    """Bytes that a run takes in scratch memory, its shift included."""
    return -(-(run.end - run.begin) // MAX_ITEM_SIZE) * MAX_ITEM_SIZE + MAX_ITEM_SIZE


def _read(
    batch: Sequence[_FileRun],
    scratch: torch.Tensor,
    settings: StorageSettings,
    progress: Callable[[int], None] | None,
) -> None:
    extents: list[Extent] = []
    at = 0
    for run in batch:
        first = at + run.begin % MAX_ITEM_SIZE
        extents.append(Extent(run.pieces[0].blob, run.begin, scratch[first : first + run.end - run.begin]))
        at += _scratch_bytes(run)

    def convert(index: int) -> None:
        run, memory = batch[index], extents[index].into
        # Parameters are written in place, and those made for inference too, on a thread of the engine's.
        with torch.inference_mode():
            for piece in run.pieces:
                first = piece.offset - run.begin
                piece.copy(memory[first : first + piece.nbytes])

    reader.fill(extents, settings, on_filled=convert, progress=progress)
