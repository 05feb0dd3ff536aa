"""Planning of one-sided reads for literal address maps."""

from __future__ import annotations

import pytest

from rfork.errors import SourceCorrupt
from rfork.image.chunks import MIB
from rfork.image.memory import Segment
from rfork.transport.mooncake.library import WireProtocol
from rfork.transport.mooncake.read_plan import (
    DIRECT_BYTES,
    SIZES,
    STAGING_BYTES,
    AddressMap,
    ContiguousPiece,
    RemoteRead,
    common_pieces,
    plan_reads,
    split_head,
)

MAX_REQUEST_BYTES = SIZES["tcp"].request


def test_an_address_map_clips_segments_to_the_range() -> None:
    """Segments are clipped at both ends of the range."""
    source = AddressMap([Segment(0, 1000, 10), Segment(10, 5000, 20), Segment(30, 9000, 5)], 35)
    assert [Segment(8, 1008, 2), Segment(10, 5000, 20), Segment(30, 9000, 1)] == list(source.segments(8, 31))


@pytest.mark.parametrize(
    ("segments", "image_bytes"),
    [
        ([Segment(0, 1000, 10), Segment(11, 2000, 10)], 21),
        ([Segment(0, 1000, 10), Segment(9, 2000, 10)], 19),
        ([Segment(0, 1000, 10)], 11),
        ([Segment(0, 1000, 0)], 0),
        ([Segment(0, 0, 10)], 10),
    ],
    ids=["gap", "overlap", "short", "empty segment", "null address"],
)
def test_an_invalid_address_map_is_source_corrupt(segments: list[Segment], image_bytes: int) -> None:
    """A map that does not cover the image exactly once is rejected."""
    with pytest.raises(SourceCorrupt, match="address map"):
        AddressMap(segments, image_bytes)


def test_common_pieces_end_where_either_side_ends() -> None:
    """A piece ends at the end of a segment on either side."""
    source = AddressMap([Segment(0, 1000, 10), Segment(10, 5000, 20)], 30)
    target = [Segment(4, 70, 16), Segment(20, 90, 10)]
    assert [
        ContiguousPiece(1004, 70, 6),
        ContiguousPiece(5000, 76, 10),
        ContiguousPiece(5010, 90, 10),
    ] == common_pieces(source.segments(4, 30), target)


def test_large_pieces_are_split() -> None:
    """A piece larger than one request becomes several requests, adjacent on both sides."""
    reads = plan_reads(
        [ContiguousPiece(1 << 30, 1 << 20, MAX_REQUEST_BYTES + 5)], gather=True, max_bytes=MAX_REQUEST_BYTES
    )
    assert [
        RemoteRead(1 << 30, MAX_REQUEST_BYTES, 1 << 20),
        RemoteRead((1 << 30) + MAX_REQUEST_BYTES, 5, (1 << 20) + MAX_REQUEST_BYTES),
    ] == reads


@pytest.mark.parametrize(("wire_protocol", "read_count"), [("tcp", 16), ("rdma", 1)])
def test_the_number_of_requests_per_chunk_depends_on_the_protocol(wire_protocol: WireProtocol, read_count: int) -> None:
    """The largest chunk is one read over RDMA; with either protocol, four reads are in flight."""
    sizes = SIZES[wire_protocol]
    reads = plan_reads([ContiguousPiece(1 << 40, 1 << 30, 256 * MIB)], gather=True, max_bytes=sizes.request)
    assert read_count == len(reads)
    assert 4 == sizes.in_flight // sizes.request


def test_small_neighbours_share_a_staged_read() -> None:
    """Pieces less than a page apart on the source are one read, in any order; distant ones are separate."""
    near, far, first = (
        ContiguousPiece(200, 9000, 50),
        ContiguousPiece(250 + 4096, 100, 50),
        ContiguousPiece(100, 7000, 20),
    )
    assert [RemoteRead(100, 150, pieces=(first, near)), RemoteRead(4346, 50, 100)] == plan_reads(
        [near, far, first], gather=True, max_bytes=MAX_REQUEST_BYTES
    )


def test_without_gather_each_piece_is_a_separate_read() -> None:
    """If areas may be registered separately, no bytes between two pieces are read."""
    assert [RemoteRead(100, 20, 7000), RemoteRead(130, 50, 9000)] == plan_reads(
        [ContiguousPiece(100, 7000, 20), ContiguousPiece(130, 9000, 50)],
        gather=False,
        max_bytes=MAX_REQUEST_BYTES,
    )


def test_a_staged_read_fits_its_buffer() -> None:
    """Neighbours that together exceed a staging buffer are split."""
    size = MIB // 4
    count = STAGING_BYTES // size + 3
    pieces = [ContiguousPiece(1 + index * size, index * 2 * size, size) for index in range(count)]
    reads = plan_reads(pieces, gather=True, max_bytes=MAX_REQUEST_BYTES)
    assert [STAGING_BYTES, 3 * size] == [request.length for request in reads]


def test_large_pieces_are_not_staged() -> None:
    """A piece of at least DIRECT_BYTES is read directly to its destination."""
    pieces = [ContiguousPiece(1, 10, DIRECT_BYTES), ContiguousPiece(1 + DIRECT_BYTES, 1 << 30, DIRECT_BYTES)]
    assert [(), ()] == [request.pieces for request in plan_reads(pieces, gather=True, max_bytes=MAX_REQUEST_BYTES)]


SMALL = (ContiguousPiece(1000, 70, 100), ContiguousPiece(1100, 500, 200), ContiguousPiece(1310, 9000, 50))
STAGED = RemoteRead(1000, 360, pieces=SMALL)


@pytest.mark.parametrize(
    ("request_", "max_bytes", "expected"),
    [
        (RemoteRead(1000, 360, 70), 360, (RemoteRead(1000, 360, 70), None)),
        (RemoteRead(1000, 360, 70), 100, (RemoteRead(1000, 100, 70), RemoteRead(1100, 260, 170))),
        (STAGED, 360, (STAGED, None)),
        (STAGED, 359, (RemoteRead(1000, 300, pieces=SMALL[:2]), RemoteRead(1310, 50, 9000))),
        (STAGED, 299, (RemoteRead(1000, 100, 70), RemoteRead(1100, 260, pieces=SMALL[1:]))),
        (STAGED, 1, (RemoteRead(1000, 100, 70), RemoteRead(1100, 260, pieces=SMALL[1:]))),
    ],
    ids=["complete", "split", "staged complete", "two pieces", "one piece", "less than a piece"],
)
def test_a_request_is_split(
    request_: RemoteRead, max_bytes: int, expected: tuple[RemoteRead, RemoteRead | None]
) -> None:
    """A direct request is split anywhere, a staged one only between pieces; the head has at least one piece."""
    assert expected == split_head(request_, max_bytes)
