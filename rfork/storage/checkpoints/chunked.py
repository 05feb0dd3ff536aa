"""A checkpoint as a source of chunks: maps byte ranges of its files to byte ranges of the image.

This requires that every stored tensor has the same bytes in the module as in its file: same dtype, same
shape, contiguous. If any tensor must be converted, the checkpoint can only be loaded as a unit. Image bytes
that no file contains (rotary tables, masks) are those that the module computed when it was built. Runs on the
target.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import nn

from rfork.errors import CheckpointError
from rfork.image import ranges
from rfork.image.memory import Image
from rfork.schema import StorageType
from rfork.storage.blob import Blob
from rfork.storage.checkpoints.checkpoint import Checkpoint
from rfork.storage.checkpoints.fingerprint import checkpoint_fingerprint
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.module_io.assignment import assign
from rfork.storage.view_cursor import ViewCursor

ComputedRanges = Sequence[tuple[int, torch.Tensor]]
"""Image offsets and bytes (uint8, 1-D) of what the module computed during construction."""


@dataclass(frozen=True, slots=True)
class CheckpointPiece:
    """Image range `[begin, end)`: bytes of a blob starting at `offset`, or computed bytes."""

    begin: int
    end: int
    source: Blob | memoryview
    offset: int


class NotBytewiseLoadable(CheckpointError):
    """The checkpoint fits the module, but not byte for byte; it can only be loaded as a unit."""


class CheckpointChunks:
    """A checkpoint that can be read by image range; see `rfork.storage.base.ImageStorage`.

    `origin` is its `rfork.storage.checkpoints.fingerprint.checkpoint_fingerprint`.
    """

    storage_type: StorageType = "checkpoint"
    manifest = None

    def __init__(self, uri: str, origin: str, pieces: Sequence[CheckpointPiece], files: ExitStack) -> None:
        self.uri = uri
        self.origin = origin
        self._pieces = pieces
        self._begins = [piece.begin for piece in pieces]
        self._files = files

    @classmethod
    def open(cls, checkpoint: Checkpoint, module: nn.Module, image: Image, computed: ComputedRanges) -> Self:
        """Map `checkpoint` onto the image of `module`; `computed` is the state before any transfer.

        Raises CheckpointError if it does not fit the module, NotBytewiseLoadable or StorageError.
        """
        with ExitStack() as opened:
            source = opened.enter_context(closing(checkpoint.source()))
            stored = list(_stored(source, module, image))
            pieces = _with_computed(_in_image_order(stored), image.layout.image_bytes, computed)
            origin = checkpoint_fingerprint(source, _computed(pieces))
            return cls(checkpoint.uri, origin, _merged(pieces), opened.pop_all())

    def read(self, begin: int, end: int, into: Sequence[memoryview]) -> None:
        """See `ImageStorage.read`."""
        cursor = ViewCursor(into)
        at, index = begin, bisect_right(self._begins, begin) - 1
        while at < end:
            piece = self._pieces[index]
            until = min(piece.end, end)
            views = cursor.next_views(until - at)
            offset = piece.offset + at - piece.begin
            if not isinstance(piece.source, memoryview):
                piece.source.read(offset, views)
            else:
                for view in views:
                    view[:] = piece.source[offset : offset + view.nbytes]
                    offset += view.nbytes
            at, index = until, index + 1

    def close(self) -> None:
        """See `ImageStorage.close`."""
        self._files.close()


def _computed(pieces: Sequence[CheckpointPiece]) -> Iterator[tuple[int, memoryview]]:
    for piece in pieces:
        if isinstance(piece.source, memoryview):
            yield piece.begin, piece.source


def _stored(source: SafetensorsSource, module: nn.Module, image: Image) -> Iterator[CheckpointPiece]:
    """Iterate over the stored tensors that the image contains, in the order in which a loader would write
    them.
    """
    assigned = assign(module, source)
    assigned.require_all()
    if own := assigned.self_loading:
        raise NotBytewiseLoadable(f"the model loads its state itself: {own[0].why}")
    if assigned.staged:
        raise NotBytewiseLoadable(f"{next(iter(assigned.staged))} is a view or shares memory with another tensor")
    image_offsets = _ImageOffsets(image)
    for name, tensor in assigned.direct.items():
        location = source.locations[name]
        if tensor.dtype is not location.dtype:
            raise NotBytewiseLoadable(f"{name} is {tensor.dtype} in the model but {location.dtype} in the checkpoint")
        if not tensor.is_contiguous() or location.stride is not None:
            raise NotBytewiseLoadable(f"{name} is not contiguous in the model")
        at = image_offsets.find(tensor) if location.nbytes else None
        if at is not None:
            yield CheckpointPiece(at, at + location.nbytes, location.blob, location.offset)


class _ImageOffsets:
    """Maps memory addresses to image offsets."""

    def __init__(self, image: Image) -> None:
        segments = image.segments(0, image.layout.image_bytes)
        self._segments = sorted(segments, key=lambda segment: segment.address)
        self._addresses = [segment.address for segment in self._segments]

    def find(self, tensor: torch.Tensor) -> int | None:
        """Return the image offset of a contiguous tensor; None if the image does not contain it."""
        address = tensor.data_ptr()
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        segment = self._segments[index]
        inside = address + tensor.nbytes <= segment.address + segment.length
        return segment.begin + address - segment.address if inside else None


def _in_image_order(stored: Sequence[CheckpointPiece]) -> list[CheckpointPiece]:
    """Return the pieces in image order. If two cover the same bytes (tied tensors stored twice), the last one
    wins.
    """
    by_range = {(piece.begin, piece.end): piece for piece in stored}
    ordered = sorted(by_range.values(), key=lambda piece: piece.begin)
    for one, other in pairwise(ordered):
        if other.begin < one.end:
            raise NotBytewiseLoadable("the checkpoint stores tensors that overlap in the model")
    return ordered


def _with_computed(
    ordered: Sequence[CheckpointPiece], image_bytes: int, computed: ComputedRanges
) -> list[CheckpointPiece]:
    """Return the pieces with the gaps filled from `computed`. Raises NotBytewiseLoadable if a gap remains."""
    gaps = ranges.subtract([(0, image_bytes)], [(piece.begin, piece.end) for piece in ordered])
    pieces = list(ordered)
    starts = [begin for begin, _ in computed]
    for begin, end in gaps:
        while begin < end:
            index = bisect_right(starts, begin) - 1
            first, memory = computed[index] if index >= 0 else (0, torch.empty(0))
            until = min(end, first + memory.numel())
            if until <= begin:
                raise NotBytewiseLoadable(f"the checkpoint has no data for the image bytes from {begin}")
            host = memory[begin - first : until - first].cpu().numpy().tobytes()
            pieces.append(CheckpointPiece(begin, until, memoryview(host), 0))
            begin = until
    return sorted(pieces, key=lambda piece: piece.begin)


def _merged(pieces: Sequence[CheckpointPiece]) -> list[CheckpointPiece]:
    """Merge pieces that are adjacent both in the image and in the file."""
    merged: list[CheckpointPiece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is not None
            and not isinstance(piece.source, memoryview)
            and last.source is piece.source
            and last.offset + last.end - last.begin == piece.offset
        ):
            merged[-1] = CheckpointPiece(last.begin, piece.end, last.source, last.offset)
        else:
            merged.append(piece)
    return merged
