"""A checkpoint of safetensors files in any store: loaded as a unit, or read by ranges of the image.

Reading by range requires that every stored tensor has the same bytes in the module as in its file: same dtype, same
shape, contiguous. If any tensor must be converted, the checkpoint can only be loaded as a unit. Image bytes that no
file contains (rotary tables, masks) are those that the module computed when it was built. Runs on the target.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from typing_extensions import Self

from rfork import settings as options
from rfork.errors import CheckpointError
from rfork.image import ranges
from rfork.image.memory import Image
from rfork.schema import StorageType
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob, ViewCursor, read_range
from rfork.storage.formats.detect import open_checkpoint
from rfork.storage.formats.safetensors_file import Shard
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.io.parallel_map import parallel_map
from rfork.storage.location import Location
from rfork.storage.module_io.assignment import assign

ORIGIN_DOMAIN = b"rfork-origin-v3\n"
MAX_FULLY_HASHED_BYTES = 64 << 10
"""Tensors up to this size are hashed completely: small edits change norms and biases."""
SAMPLE_BYTES = 4096
READ_BYTES = 1 << 20
THREADS = 16
MAX_REMOTE_READS = 64
"""Limit for a remote checkpoint: each read is a request, and many instances send them."""

_Sample = tuple[Blob, int, int]

ComputedRanges = Sequence[tuple[int, torch.Tensor]]
"""Image offsets and bytes (uint8, 1-D) of what the module computed during construction."""


def checkpoint_fingerprint(source: SafetensorsSource, computed: Iterable[tuple[int, memoryview]]) -> str:
    """Return a hash, as 32 hex digits, over

    - the index file;
    - of each shard: name, size, header, and of each tensor all bytes up to 64 KiB, or the first, middle
      and last 4 KiB if it is larger;
    - of a remote shard also its version (an ETag), if any, and instead of the tensor bytes above only
      64 samples of 4 KiB, evenly spread over all shards;
    - `computed`: image offsets and bytes of what the module computed during construction.

    Two instances that read the same objects, or copies of the same files, get the same hash. Files with the
    same hash may still differ inside a large tensor: before continuing with chunks from another reader, an
    instance compares their digests. Raises StorageError.
    """
    state = hashlib.sha256(ORIGIN_DOMAIN)

    def cover(data: bytes | memoryview) -> None:
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)

    cover(source.index)
    ordered = sorted(source.shards, key=lambda shard: shard.name)
    for shard in ordered:
        # A local file's version (inode, mtime) differs between machines that have the same copy.
        version = (shard.blob.version or "") if source.remote else ""
        cover(f"{shard.name}\n{shard.blob.size}\n{version}".encode())
        cover(shard.head_digest)
    samples = [sample for shard in ordered for sample in _samples(shard)]
    if source.remote:
        samples = _sample_evenly(samples, MAX_REMOTE_READS)
    # In parallel: on a network disk, each of these small reads costs a round trip.
    for digest in parallel_map(source.uri, _digest, samples, THREADS):
        cover(digest)
    for begin, memory in computed:
        cover(begin.to_bytes(8, "little"))
        cover(memory)
    return state.hexdigest()[:32]


def _samples(shard: Shard) -> Iterator[_Sample]:
    """Iterate over the ranges to read from a shard; adjacent ranges are merged."""
    parts: list[ranges.Range] = []
    for location in shard.locations.values():
        begin, end = location.offset, location.offset + location.nbytes
        if location.nbytes <= MAX_FULLY_HASHED_BYTES:
            parts.append((begin, end))
        else:
            middle = (begin + end - SAMPLE_BYTES) // 2
            parts += [
                (begin, begin + SAMPLE_BYTES),
                (middle, middle + SAMPLE_BYTES),
                (end - SAMPLE_BYTES, end),
            ]
    for begin, end in ranges.normalise(parts):
        for at in range(begin, end, READ_BYTES):
            yield shard.blob, at, min(READ_BYTES, end - at)


def _sample_evenly(samples: Sequence[_Sample], max_samples: int) -> list[_Sample]:
    """Return at most `max_samples` shortened samples: the first, the last and evenly spaced ones between."""
    if len(samples) > max_samples:
        samples = [samples[turn * (len(samples) - 1) // (max_samples - 1)] for turn in range(max_samples)]
    return [(blob, at, min(length, SAMPLE_BYTES)) for blob, at, length in samples]


def _digest(sample: _Sample) -> bytes:
    return hashlib.sha256(read_range(*sample)).digest()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were present and complete when it was opened. Keeps no file open."""

    uri: str
    names: frozenset[str]
    settings: StorageSettings
    _requested_uri: str = field(repr=False)  # includes the query of a presigned URL, which is a secret

    @classmethod
    def open(cls, uri: str | Path, settings: StorageSettings | None = None) -> Checkpoint:
        """Find the files at a URI or path (see `formats.detect.open_source`) and check their headers.

        Raises CheckpointError if something is missing, or if it is a snapshot, whose bytes would not be
        verified; StorageCorrupt if a file is truncated or malformed; and other StorageErrors.
        """
        chosen = settings or options.load(StorageSettings)
        with closing(_opened(uri, chosen)) as source:
            return cls(Location.parse(uri).uri, frozenset(source.locations), chosen, str(uri))

    def source(self) -> SafetensorsSource:
        """Open the tensor source again; the caller closes it. Raises the same errors as `open`."""
        return _opened(self._requested_uri, self.settings)

    def load_into(self, module: nn.Module, progress: Callable[[int], None] | None = None) -> None:
        """Load the module's parameters and persistent buffers, like torch's strict `load_state_dict`.

        Converts dtypes where they differ. `progress` receives byte counts. Raises CheckpointError if a tensor
        is missing, unknown or has another shape, before anything is written (except by modules that load
        their own state); StorageError subclasses if a file cannot be read: the content of the module is then
        undefined.
        """
        with closing(self.source()) as source:
            assigned = assign(module, source)
            assigned.require_all()
            assigned.load_own(source, strict=True, progress=progress)
            assigned.fill(source, progress)


def _opened(uri: str | Path, settings: StorageSettings) -> SafetensorsSource:
    source = open_checkpoint(uri, settings)
    if any(shard.layout is not None for shard in source.shards):
        source.close()
        raise CheckpointError(
            f"{source.uri} is an rfork snapshot: pass it as snapshot=",
            hint="loaded as a checkpoint, its bytes would not be verified against their digests",
        )
    return source


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

    `origin` is its `rfork.storage.checkpoint.checkpoint_fingerprint`.
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
