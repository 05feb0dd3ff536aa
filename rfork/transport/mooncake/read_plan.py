"""Plans the remote reads that fill an image range: pure functions over two address maps. Runs on the target.

Reads are one-sided, and each costs 40 to 80 µs regardless of its size. So bytes adjacent on both sides become
one read; large reads are split, so that several are in flight; and small pieces that are close together on
the source, but scattered on the target, are read into a staging buffer as one area.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rfork.errors import SourceCorrupt
from rfork.image.chunks import MIB
from rfork.image.memory import Segment
from rfork.transport.mooncake.library import WireProtocol


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Maximum bytes of one read, and of all reads in flight."""

    request: int
    in_flight: int


SIZES: Mapping[WireProtocol, ReadLimits] = {
    # 16 to 64 MiB are equally fast, and a smaller read can be stopped sooner.
    "tcp": ReadLimits(16 * MIB, 64 * MIB),
    # A 200 Gbit/s card reaches 22.5 GB/s with reads of 32 MiB and 23.0 GB/s with 256 MiB (Mooncake's
    # figures). Four reads in flight: one chunk of maximum size for each slot of a fork's default window.
    "rdma": ReadLimits(256 * MIB, 1024 * MIB),
}
"""Limits by protocol."""

STAGING_BYTES = 2 * MIB
"""Maximum bytes of one staged read. With 1 to 2 MiB, the bytes are in a cache when they are copied out, which takes
two thirds of the CPU time that it takes with 8 MiB.
"""

DIRECT_BYTES = 512 * 1024
"""Pieces of at least this size are read directly to their destination: a separate read is cheaper than a
second copy.
"""

MAX_COALESCE_GAP = 4096
"""Gaps below this (one page) lie inside one registered area: `rfork.image.registration` merges across them."""


@dataclass(frozen=True, slots=True)
class ContiguousPiece:
    """Bytes that are contiguous in memory on both sides: remote address, local address and length."""

    remote: int
    local: int
    length: int


@dataclass(frozen=True, slots=True)
class RemoteRead:
    """One read of `length` bytes at `remote`.

    Without `pieces` it is read to address `local`. With `pieces` it is read to a staging buffer, from which
    each piece is copied to its destination.
    """

    remote: int
    length: int
    local: int = 0
    pieces: tuple[ContiguousPiece, ...] = ()


class AddressMap:
    """The source's memory according to its endpoint: segments that cover the complete image, in order.

    Raises SourceCorrupt if they do not.
    """

    def __init__(self, segments: Sequence[Segment], image_bytes: int) -> None:
        end = 0
        for segment in segments:
            if segment.begin != end or segment.length <= 0 or segment.address <= 0:
                raise SourceCorrupt(f"the source's address map is invalid at image byte {end}")
            end += segment.length
        if end != image_bytes:
            raise SourceCorrupt(f"the source's address map covers {end} of {image_bytes} bytes")
        self._segments = tuple(segments)
        self._begins = [segment.begin for segment in segments]

    def segments(self, begin: int, end: int) -> Iterator[Segment]:
        """Yield the segments of image range `[begin, end)`, clipped to it."""
        index = max(bisect_right(self._begins, begin) - 1, 0)
        while index < len(self._segments) and self._segments[index].begin < end:
            at, address, length = self._segments[index]
            first, last = max(begin, at), min(end, at + length)
            yield Segment(first, address + first - at, last - first)
            index += 1


def common_pieces(source: Iterator[Segment], target: Sequence[Segment]) -> list[ContiguousPiece]:
    """Return the pieces that are contiguous on both sides, in image order.

    Both maps cover the same image range without gaps, and their segments are as long as possible (see
    `EngineImage.segments`): joining pieces further could cross the border of a registered area.
    """
    pieces: list[ContiguousPiece] = []
    remote = next(source, None)
    for at, address, length in target:
        while length > 0 and remote is not None:
            skip = at - remote.begin
            run = min(length, remote.length - skip)
            pieces.append(ContiguousPiece(remote.address + skip, address, run))
            at, address, length = at + run, address + run, length - run
            if skip + run == remote.length:
                remote = next(source, None)
    return pieces


def plan_reads(pieces: Sequence[ContiguousPiece], *, gather: bool, max_bytes: int) -> list[RemoteRead]:
    """Return the reads that fill `pieces`, each of at most `max_bytes` bytes; with `gather`, small neighbours
    share one.
    """
    reads: list[RemoteRead] = []
    small: list[ContiguousPiece] = []
    for piece in pieces:
        if gather and piece.length < DIRECT_BYTES:
            small.append(piece)
        else:
            reads.extend(_split_piece(piece, max_bytes))
    group: list[ContiguousPiece] = []
    for piece in sorted(small, key=lambda piece: piece.remote):
        if group and not _can_coalesce(group, piece):
            reads.append(_coalesce(group))
            group = []
        group.append(piece)
    if group:
        reads.append(_coalesce(group))
    return reads


def split_head(request: RemoteRead, max_bytes: int) -> tuple[RemoteRead, RemoteRead | None]:
    """Split a request into a head of at most `max_bytes` bytes (or of one piece) and the rest, if any."""
    if request.length <= max_bytes:
        return request, None
    if not request.pieces:
        rest = RemoteRead(request.remote + max_bytes, request.length - max_bytes, request.local + max_bytes)
        return RemoteRead(request.remote, max_bytes, request.local), rest
    ends = [piece.remote + piece.length - request.remote for piece in request.pieces]
    count = max(1, bisect_right(ends, max_bytes))
    if count == len(ends):
        return request, None
    return _coalesce([*request.pieces[:count]]), _coalesce([*request.pieces[count:]])


def _split_piece(piece: ContiguousPiece, max_bytes: int) -> Iterator[RemoteRead]:
    for offset in range(0, piece.length, max_bytes):
        length = min(max_bytes, piece.length - offset)
        yield RemoteRead(piece.remote + offset, length, piece.local + offset)


def _can_coalesce(group: list[ContiguousPiece], piece: ContiguousPiece) -> bool:
    gap = piece.remote - (group[-1].remote + group[-1].length)
    return gap < MAX_COALESCE_GAP and piece.remote + piece.length - group[0].remote <= STAGING_BYTES


def _coalesce(group: list[ContiguousPiece]) -> RemoteRead:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return RemoteRead(first.remote, first.length, first.local)
    return RemoteRead(first.remote, last.remote + last.length - first.remote, pieces=tuple(group))
