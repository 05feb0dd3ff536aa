"""Conversions of the peer protocol: values survive encoding, and inconsistent messages are rejected."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from rfork.errors import (
    DeviceDown,
    GpuDirectUnavailable,
    LayoutMismatch,
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
    TransportUnavailable,
)
from rfork.image.chunks import MIB
from rfork.image.layout import Layout, Manifest, TensorSpec
from rfork.image.memory import Segment
from rfork.peer import codec
from rfork.peer.base import BoxImage, Progress, StorageActivity
from rfork.peer.server import MAX_REQUEST_BYTES
from rfork.peer.v1 import peer_pb2
from rfork.transport.base import Endpoint

Parts = list[peer_pb2.GetManifestResponse]
"""The messages that carry one manifest."""


def layout(tensor_count: int = 3, image_bytes: int = 2 * MIB) -> Layout:
    """Return a layout with this number of tensors."""
    specs = (TensorSpec(f"t.{index}", "float32", (index, 2), (2, 1), index) for index in range(tensor_count))
    return Layout(tuple(specs), image_bytes)


def manifest(of_layout: Layout | None = None) -> Manifest:
    """Return a manifest with a different digest for each chunk."""
    described = of_layout or layout()
    return Manifest(described, tuple(bytes([index]) * 16 for index in range(len(described.chunks))))


def parts(original: Manifest | None = None, *, include_tensors: bool = True) -> Parts:
    """Return the encoded messages as the other side decodes them."""
    return [
        peer_pb2.GetManifestResponse.FromString(part.SerializeToString())
        for part in codec.manifest_parts(original or manifest(), 4, include_tensors=include_tensors)
    ]


@pytest.mark.parametrize("tensor_count", [0, 1, 2000, 2001, 50_000])
def test_a_manifest_survives_encoding(tensor_count: int) -> None:
    """Any number of tensors is sent in messages far smaller than gRPC's limit of 4 MiB."""
    original = manifest(layout(tensor_count))
    sent = parts(original)
    assert original == codec.manifest_from(sent, None)
    assert max(part.ByteSize() for part in sent) < MIB


@pytest.mark.parametrize("count", [1, 2000, 2001])
def test_attributes_are_sent_with_the_tensors(count: int) -> None:
    """Any number of attributes survives encoding."""
    lines = tuple(f"attribute{index}=1 at layer" for index in range(count))
    original = manifest(Layout(layout(3).tensors, layout(3).image_bytes, lines))
    assert original == codec.manifest_from(parts(original), None)


def test_a_manifest_without_tensors_uses_the_readers_layout() -> None:
    """A reader with the same layout receives only the summary and the digests."""
    sent = parts(include_tensors=False)
    assert manifest() == codec.manifest_from(sent, layout())
    assert 2 == len(sent)


def test_a_manifest_of_an_empty_image_survives_encoding() -> None:
    """An image without chunks has a manifest too."""
    empty = Manifest(Layout((), 0), ())
    assert empty == codec.manifest_from(parts(empty), None)


def test_the_summary_describes_the_image() -> None:
    """The first message contains ids, sizes, counts and the generation."""
    summary = parts()[0].summary
    assert layout().layout_id == summary.layout_id
    assert manifest().weights_id == summary.weights_id
    assert 2 * MIB == summary.image_bytes
    assert 4 == summary.generation
    assert 3 == summary.tensor_count
    assert 2 == summary.chunk_count


def without_summary(sent: Parts) -> None:
    sent.pop(0)


def other_layout_id(sent: Parts) -> None:
    sent[0].summary.layout_id = "0" * 32


def other_tensor(sent: Parts) -> None:
    sent[1].tensors[0].offset += 1


def other_size(sent: Parts) -> None:
    sent[0].summary.image_bytes += 1


def other_digest(sent: Parts) -> None:
    sent[-1].digests = b"x" * len(sent[-1].digests)


def missing_digest(sent: Parts) -> None:
    sent[-1].digests = sent[-1].digests[:-16]


def additional_digest(sent: Parts) -> None:
    sent[-1].digests += b"x" * 16


def half_a_digest(sent: Parts) -> None:
    sent[-1].digests = sent[-1].digests[:-8]


def other_weights_id(sent: Parts) -> None:
    sent[0].summary.weights_id = "0" * 32


CORRUPTIONS = [
    without_summary,
    other_layout_id,
    other_tensor,
    other_size,
    other_digest,
    missing_digest,
    additional_digest,
    half_a_digest,
    other_weights_id,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_an_inconsistent_manifest_is_source_corrupt(corrupt: Callable[[Parts], None]) -> None:
    """A manifest with inconsistent parts is the source's fault."""
    sent = parts()
    corrupt(sent)
    with pytest.raises(SourceCorrupt):
        codec.manifest_from(sent, None)


@pytest.mark.parametrize("corrupt", [other_digest, missing_digest, additional_digest, half_a_digest, other_weights_id])
def test_an_inconsistent_manifest_without_tensors_is_source_corrupt(corrupt: Callable[[Parts], None]) -> None:
    """A reader that uses its own layout still checks the summary and the digests."""
    sent = parts(include_tensors=False)
    corrupt(sent)
    with pytest.raises(SourceCorrupt):
        codec.manifest_from(sent, layout())


def test_another_layout_is_a_mismatch() -> None:
    """A source with another layout raises LayoutMismatch, which does not blame the source's bytes."""
    with pytest.raises(LayoutMismatch):
        codec.manifest_from(parts(include_tensors=False), layout(4))


@pytest.mark.parametrize(
    "endpoint",
    [
        Endpoint("http", {"port": "80", "path": "/image"}),
        Endpoint("transfer_engine", {}, (Segment(0, 1 << 47, 5), Segment(5, 12, 1 << 40))),
    ],
)
def test_an_endpoint_survives_encoding(endpoint: Endpoint) -> None:
    """Parameters and memory addresses are unchanged."""
    message = codec.endpoint_message("c1", endpoint, 3)
    received = peer_pb2.OpenChannelResponse.FromString(message.SerializeToString())
    assert "c1" == received.channel_id
    assert 3 == received.generation
    assert endpoint == codec.endpoint_of(received)


def test_segment_lists_of_different_length_are_source_corrupt() -> None:
    """An address without a length is invalid."""
    message = codec.endpoint_message("c1", Endpoint("x", {}, (Segment(0, 1, 2),)), 0)
    message.segment_begin.append(7)
    with pytest.raises(SourceCorrupt):
        codec.endpoint_of(message)


@pytest.mark.parametrize(
    "progress",
    [
        Progress((), draining=False),
        Progress(((0, 2), (5, 6)), draining=True, weights_id="ab" * 16),
        Progress(((3, 5),), False, (b"x" * 16, b"y" * 16), "cd" * 16, None, StorageActivity(1.5)),
        Progress((), draining=False, storage_activity=StorageActivity(0.0, relayed=True)),
        Progress((), draining=False, rate=5_000_000),
    ],
    ids=["keep-alive", "complete", "provisional", "relayed", "rate"],
)
def test_progress_survives_encoding(progress: Progress) -> None:
    """Chunks, digests, ids and flags are unchanged."""
    message = codec.progress_message(progress, 7)
    received = peer_pb2.WatchProgressResponse.FromString(message.SerializeToString())
    assert 7 == received.generation
    assert progress == codec.progress_of(received)


def test_a_rate_of_zero_is_raised_to_one() -> None:
    """Zero would stop a reader for ever; the source means that it is slow."""
    assert 1 == codec.progress_of(peer_pb2.WatchProgressResponse(rate=0)).rate


@pytest.mark.parametrize(("begin", "end", "digests"), [(0, 2, 16), (0, 1, 15), (2, 0, 16), (0, 1 << 60, 16)])
def test_digests_that_do_not_match_the_chunks_are_source_corrupt(begin: int, end: int, digests: int) -> None:
    """There must be one digest per chunk, for any claimed number of chunks."""
    message = peer_pb2.WatchProgressResponse(digests=b"x" * digests)
    message.chunks.add(begin=begin, end=end)
    with pytest.raises(SourceCorrupt):
        codec.progress_of(message)


class FailedCall(grpc.RpcError, grpc.Call):
    """A call that ended with a status, as raised by grpc."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def initial_metadata(self) -> tuple[()]:
        return ()

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


@pytest.mark.parametrize("error", [LeaseRejected, SourceBusy, SourceWeightsChanged, LayoutMismatch])
def test_an_error_of_the_source_keeps_its_type(error: type[RforkError]) -> None:
    """The target raises the same error as the source."""
    received = codec.error_from_call(FailedCall(codec.STATUS_OF[error], "why"), "host:1")
    assert type(received) is error
    assert "host:1: why" == str(received)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, SourceUnavailable),
        (grpc.StatusCode.CANCELLED, SourceUnavailable),
        (grpc.StatusCode.INTERNAL, SourceUnavailable),
        (grpc.StatusCode.UNIMPLEMENTED, SourceUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, SourceTimeout),
        (grpc.StatusCode.NOT_FOUND, SourceWeightsChanged),
    ],
)
def test_other_status_codes_map_to_source_errors(code: grpc.StatusCode, expected: type[RforkError]) -> None:
    """Other failures mean that the source is unavailable, timed out or changed."""
    assert expected is type(codec.error_from_call(FailedCall(code, ""), "host:1"))


def test_a_closed_channel_is_source_unavailable() -> None:
    """grpc's ValueError for a locally closed channel is not a bug."""
    assert SourceUnavailable is type(
        codec.error_from_call(ValueError("Cannot invoke RPC on closed channel!"), "host:1")
    )


@pytest.mark.parametrize("error", [TransportUnavailable, GpuDirectUnavailable, DeviceDown])
def test_a_transport_failure_on_the_source_is_a_network_fault(error: type[RforkError]) -> None:
    """All subclasses become TransportUnavailable on the target."""
    received = codec.error_from_call(FailedCall(codec.STATUS_OF[error], "no memory"), "host:1")
    assert type(received) is TransportUnavailable
    assert "network" == received.fault
    assert "host:1: no memory" == str(received)


@pytest.mark.parametrize("size", [0, 1, codec.PLACEMENT_PART_BYTES, codec.PLACEMENT_PART_BYTES + 1])
def test_a_placement_map_survives_encoding(size: int) -> None:
    """A map of any size is sent in messages below gRPC's default limit of 4 MiB."""
    data = bytes(range(256)) * (size // 256 + 1)
    sent = list(codec.placement_parts(data[:size]))
    assert data[:size] == codec.placement_from(sent)
    assert max((part.ByteSize() for part in sent), default=0) < 2 * MIB


def test_a_placement_map_that_is_too_large_is_source_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target does not collect parts without limit."""
    monkeypatch.setattr(codec, "MAX_PLACEMENT_BYTES", 100)
    endless = (peer_pb2.GetPlacementResponse(content=bytes(60)) for _ in iter(int, 1))
    with pytest.raises(SourceCorrupt, match="100 bytes"):
        codec.placement_from(endless)


@pytest.mark.parametrize("size", [0, 1, codec.BOXES_PART_BYTES, codec.BOXES_PART_BYTES + 1])
def test_a_request_for_boxes_has_a_message(size: int) -> None:
    """A list of any size is sent in at least one message, below the limit of the service."""
    sent = list(codec.boxes_parts(b"x" * size))
    assert b"x" * size == b"".join(part.content for part in sent)
    assert 1 <= len(sent)
    assert max(part.ByteSize() for part in sent) <= MAX_REQUEST_BYTES


def test_a_request_for_too_many_boxes_is_refused() -> None:
    """The limit is the same on both sides."""
    codec.check_boxes_size(codec.MAX_BOXES_BYTES)
    with pytest.raises(LayoutMismatch, match=str(codec.MAX_BOXES_BYTES)):
        codec.check_boxes_size(codec.MAX_BOXES_BYTES + 1)


def test_a_box_image_survives_encoding() -> None:
    """Its identity arrives unchanged."""
    image = BoxImage("model#boxes", "v1", "0" * 32, 5 << 32)
    assert image == codec.box_image_of(codec.box_image_message(image))
