"""Which remote reads fill an image range: pure functions over two address maps. Runs on the target.

Reads are one-sided, and each costs 40 to 80 µs whatever its size. So what is adjacent on both sides
becomes one read; large reads are cut, so that several are in flight; and small pieces that lie near
one another at the source, but apart here, are read as one area into a staging buffer.
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
    """Most bytes of one read, and of all reads that are under way at once."""

    request: int
    in_flight: int


SIZES: Mapping[WireProtocol, ReadLimits] = {
    # 16 to 64 MiB are equally fast, and a small read ends sooner when it must.
    "tcp": ReadLimits(16 * MIB, 64 * MIB),
    # A card of 200 Gbit/s gives 22.5 GB/s in reads of 32 MiB, and 23.0 in reads of 256 (Mooncake's figures).
    # Four are under way: one chunk of the largest size for each place of a fork's usual window.
    "rdma": ReadLimits(256 * MIB, 1024 * MIB),
}
"""By what the engine runs over."""

STAGING_BYTES = 8 * MIB
"""Most bytes of one staged read."""

DIRECT_BYTES = 512 * 1024
"""Pieces from this size go straight to their place: a read of their own costs less than a second copy."""

MAX_COALESCE_GAP = 4096
"""Gaps below this (a page) lie inside one registered area: `rfork.image.registration` merges over them."""


@dataclass(frozen=True, slots=True)
class ContiguousPiece:
    """A run of bytes that is one run of memory on both sides: remote and local address, length."""

    remote: int
    local: int
    length: int


@dataclass(frozen=True, slots=True)
class RemoteRead:
    """One read of `length` bytes at `remote`.

    Without `pieces` it goes to address `local`; with them it goes to a staging buffer, from where
    each piece is copied to its own place.
    """

    remote: int
    length: int
    local: int = 0
    pieces: tuple[ContiguousPiece, ...] = ()


class AddressMap:
    """The source's memory as its endpoint tells it: segments that cover the whole image, in order.

    Raises SourceCorrupt when they do not.
    """

    def __init__(self, segments: Sequence[Segment], image_bytes: int) -> None:
        end = 0
        for segment in segments:
            if segment.begin != end or segment.length <= 0 or segment.address <= 0:
                raise SourceCorrupt(f"the source's address map is broken at image byte {end}")
            end += segment.length
        if end != image_bytes:
            raise SourceCorrupt(f"the source's address map covers {end} of {image_bytes} bytes")
        self._segments = tuple(segments)
        self._begins = [segment.begin for segment in segments]

    def segments(self, begin: int, end: int) -> Iterator[Segment]:
        """The segments of image range `[begin, end)`, cut to it."""
        index = max(bisect_right(self._begins, begin) - 1, 0)
        while index < len(self._segments) and self._segments[index].begin < end:
            at, address, length = self._segments[index]
            first, last = max(begin, at), min(end, at + length)
            yield Segment(first, address + first - at, last - first)
            index += 1


def common_pieces(source: Iterator[Segment], target: Sequence[Segment]) -> list[ContiguousPiece]:
    """The runs that are contiguous on both sides, in image order.

    Both maps cover the same image range without holes, and their segments are as long as their memory
    allows (see `EngineImage.segments`): joining pieces further could cross from one registered area to another.
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


def requests(pieces: Sequence[ContiguousPiece], *, gather: bool, max_bytes: int) -> list[RemoteRead]:
    """The reads that fill `pieces`, of at most `max_bytes` bytes; with `gather`, small neighbours share one."""
    planned: list[RemoteRead] = []
    small: list[ContiguousPiece] = []
    for piece in pieces:
        if gather and piece.length < DIRECT_BYTES:
            small.append(piece)
        else:
            planned.extend(_cut(piece, max_bytes))
    group: list[ContiguousPiece] = []
    for piece in sorted(small, key=lambda piece: piece.remote):
        if group and not _can_coalesce(group, piece):
            planned.append(_coalesce(group))
            group = []
        group.append(piece)
    if group:
        planned.append(_coalesce(group))
    return planned


def split_head(request: RemoteRead, max_bytes: int) -> tuple[RemoteRead, RemoteRead | None]:
    """Part a request in two: the first of at most `max_bytes` bytes, or of one piece, and what is left."""
    if request.length <= max_bytes:
        return request, None
    if not request.pieces:
        left = RemoteRead(request.remote + max_bytes, request.length - max_bytes, request.local + max_bytes)
        return RemoteRead(request.remote, max_bytes, request.local), left
    ends = [piece.remote + piece.length - request.remote for piece in request.pieces]
    count = max(1, bisect_right(ends, max_bytes))
    if count == len(ends):
        return request, None
    return _coalesce([*request.pieces[:count]]), _coalesce([*request.pieces[count:]])


def _cut(piece: ContiguousPiece, max_bytes: int) -> Iterator[RemoteRead]:
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
