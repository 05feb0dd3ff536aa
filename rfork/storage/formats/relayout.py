"""Fills tensors whose dtype or memory layout differs from the stored one, using bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rfork.image.layout import contiguous_stride
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob
from rfork.storage.formats.safetensors_file import TensorLocation
from rfork.storage.io import reader
from rfork.storage.io.reader import Extent

RUN_BYTES = 4 << 20
"""Bytes to read before converting them; several threads work on one run each."""
MIN_MEMORY = 16 << 20
MAX_ITEM_SIZE = 16
"""Largest item size in bytes. Runs have this alignment in the file and in memory."""


def is_bytewise(location: TensorLocation, dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Return True if the stored bytes equal those of a tensor with this dtype, in one contiguous run."""
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
    """Fill tensors of the stored shape, sorted by blob and offset, each as its bytes arrive.

    Uses half of `settings.staging_bytes`, or more if a non-contiguous stored tensor is larger. Raises the
    same errors as `rfork.storage.io.reader.fill`.
    """
    half = max(MIN_MEMORY, settings.staging_bytes // 2)
    halved = settings.model_copy(update={"staging_bytes": half})
    scratch = torch.empty(0, dtype=torch.uint8)
    for batch in _batches(_runs(_pieces(pairs, min(RUN_BYTES, half)), gap, min(RUN_BYTES, half)), half):
        needed = sum(_scratch_bytes(run) for run in batch)
        if scratch.numel() < needed:
            scratch = torch.empty(needed, dtype=torch.uint8)
        _read(batch, scratch, halved, progress)


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
    """Return the scratch memory for a run in bytes, including its alignment shift."""
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
        # Parameters are written in place, inference tensors too, on the calling engine's thread.
        with torch.inference_mode():
            for piece in run.pieces:
                first = piece.offset - run.begin
                piece.copy(memory[first : first + piece.nbytes])

    reader.fill(extents, settings, on_filled=convert, progress=progress)
