"""Stored tensors into tensors that are laid out otherwise, or of another type: by way of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rfork.image.strides import contiguous_stride
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob
from rfork.storage.formats.safetensors_file import Place
from rfork.storage.reading import engine
from rfork.storage.reading.engine import Extent

RUN_BYTES = 4 << 20
"""Bytes that are read before what they hold is converted; by several threads, each a run of its own."""
LEAST_MEMORY = 16 << 20
WIDEST = 16
"""The widest item in bytes: what a run is aligned by, in its file and in memory."""


def as_stored(place: Place, dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor, were it of `dtype`, are those that are stored, in one run of memory."""
    if place.dtype is not dtype:
        return False
    if place.stride is None:
        return tensor.is_contiguous()
    return place.stride == tensor.stride() and place.nbytes == tensor.numel() * dtype.itemsize


def fill(
    pairs: Iterable[tuple[Place, torch.Tensor]],
    gap: int,
    settings: StorageSettings,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill tensors with what is stored of the same shape, sorted by blob and offset, each as it comes.

    Takes half of `settings.memory`, and where a stored tensor that is not contiguous is larger, its size.
    Raises as `rfork.storage.reading.engine.fill` does.
    """
    half = max(LEAST_MEMORY, settings.memory // 2)
    halved = settings.model_copy(update={"memory": half})
    scratch = torch.empty(0, dtype=torch.uint8)
    for batch in _batches(_runs(_pieces(pairs, min(RUN_BYTES, half)), gap, min(RUN_BYTES, half)), half):
        needed = sum(_room(run) for run in batch)
        if scratch.numel() < needed:
            scratch = torch.empty(needed, dtype=torch.uint8)
        _read(batch, scratch, halved, progress)


@dataclass(frozen=True, slots=True)
class _Piece:
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
class _Run:
    """File range `[begin, end)` of one blob, with all of `pieces`."""

    begin: int
    end: int
    pieces: list[_Piece]


def _pieces(pairs: Iterable[tuple[Place, torch.Tensor]], most: int) -> Iterator[_Piece]:
    for place, tensor in pairs:
        target = tensor.detach()
        if place.stride is None:
            yield from _cut(place, target, place.offset, most)
        else:
            yield _Piece(place.blob, place.offset, place.nbytes, place.dtype, place.stride, target)


def _cut(place: Place, target: torch.Tensor, offset: int, most: int) -> Iterator[_Piece]:
    """Parts of a contiguous stored tensor of at most `most` bytes."""
    nbytes = target.numel() * place.dtype.itemsize
    if nbytes <= most or not target.dim():
        stride = contiguous_stride(target.shape)
        yield _Piece(place.blob, offset, nbytes, place.dtype, stride, target)
        return
    row = nbytes // target.shape[0]
    step = max(1, most // row)
    for first in range(0, target.shape[0], step):
        part = target[first] if row > most else target[first : first + step]
        yield from _cut(place, part, offset + first * row, most)


def _runs(pieces: Iterable[_Piece], gap: int, most: int) -> Iterator[_Run]:
    run: _Run | None = None
    for piece in pieces:
        end = piece.offset + piece.nbytes
        if run is not None and (
            piece.blob is run.pieces[0].blob
            and piece.offset <= run.end + gap
            and max(end, run.end) - run.begin <= most
        ):
            run.pieces.append(piece)
            run.end = max(end, run.end)
            continue
        if run is not None:
            yield run
        run = _Run(piece.offset, end, [piece])
    if run is not None:
        yield run


def _batches(runs: Iterable[_Run], most: int) -> Iterator[list[_Run]]:
    batch: list[_Run] = []
    used = 0
    for run in runs:
        if batch and used + _room(run) > most:
            yield batch
            batch, used = [], 0
        batch.append(run)
        used += _room(run)
    if batch:
        yield batch


def _room(run: _Run) -> int:
    """Bytes that a run takes in scratch memory, its shift included."""
    return -(-(run.end - run.begin) // WIDEST) * WIDEST + WIDEST


def _read(
    batch: Sequence[_Run],
    scratch: torch.Tensor,
    settings: StorageSettings,
    progress: Callable[[int], None] | None,
) -> None:
    extents: list[Extent] = []
    at = 0
    for run in batch:
        first = at + run.begin % WIDEST
        extents.append(Extent(run.pieces[0].blob, run.begin, scratch[first : first + run.end - run.begin]))
        at += _room(run)

    def convert(index: int) -> None:
        run, memory = batch[index], extents[index].into
        # Parameters are written in place, and those made for inference too, on a thread of the engine's.
        with torch.inference_mode():
            for piece in run.pieces:
                first = piece.offset - run.begin
                piece.copy(memory[first : first + piece.nbytes])

    engine.fill(extents, settings, on_filled=convert, progress=progress)
