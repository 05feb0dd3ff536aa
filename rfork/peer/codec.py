"""Conversions between rfork's values and the messages and status codes of ``peer.proto``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import grpc

from rfork.errors import (
    DeviceDown,
    GpuDirectUnavailable,
    LayoutMismatch,
    LeaseRejected,
    NotSameHost,
    PeerAccessUnavailable,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
    TransportUnavailable,
    VersionMismatch,
)
from rfork.image import ranges
from rfork.image.digest import DIGEST_BYTES
from rfork.image.layout import Layout, Manifest, SpecType, TensorSpec, TensorSpecTable
from rfork.image.memory import Segment
from rfork.peer.base import BoxImage, Progress, StorageActivity
from rfork.peer.v1 import peer_pb2
from rfork.transport.base import Endpoint

TENSORS_PER_PART = 2000
"""Tensor specs per message: about 200 kB, well below gRPC's default limit of 4 MiB."""
PLACEMENT_PART_BYTES = 1 << 20
MAX_PLACEMENT_BYTES = 256 << 20
BOXES_PART_BYTES = 64 << 10
MAX_BOXES_BYTES = 64 << 20

UNUSABLE = (
    TransportUnavailable,
    NotSameHost,
    PeerAccessUnavailable,
    GpuDirectUnavailable,
    DeviceDown,
    VersionMismatch,
)
STATUS_OF: dict[type[RforkError], grpc.StatusCode] = {
    **dict.fromkeys(UNUSABLE, grpc.StatusCode.FAILED_PRECONDITION),
    LeaseRejected: grpc.StatusCode.PERMISSION_DENIED,
    SourceBusy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SourceWeightsChanged: grpc.StatusCode.ABORTED,
    LayoutMismatch: grpc.StatusCode.INVALID_ARGUMENT,
    SourceCorrupt: grpc.StatusCode.DATA_LOSS,
}
_ERROR_OF: dict[grpc.StatusCode, type[RforkError]] = {
    **{status: error for error, status in STATUS_OF.items()},
    grpc.StatusCode.FAILED_PRECONDITION: TransportUnavailable,  # subclasses are not distinguished; no side is blamed
    grpc.StatusCode.NOT_FOUND: SourceWeightsChanged,
    grpc.StatusCode.DEADLINE_EXCEEDED: SourceTimeout,
}


def error_from_call(error: Exception, address: str) -> RforkError:
    """Return the error for a failed call to the peer at `address`. Runs on the target."""
    if not isinstance(error, grpc.Call):
        return SourceUnavailable(f"{address}: {error}")
    code = error.code()
    return _ERROR_OF.get(code, SourceUnavailable)(f"{address}: {error.details() or code}")


def manifest_parts(
    manifest: Manifest, generation: int, *, include_tensors: bool
) -> Iterator[peer_pb2.GetManifestResponse]:
    """Yield the manifest in small messages: summary, then tensors if requested, then digests."""
    layout = manifest.layout
    yield peer_pb2.GetManifestResponse(
        summary=peer_pb2.GetManifestResponse.Summary(
            layout_id=layout.layout_id,
            weights_id=manifest.weights_id,
            image_bytes=layout.image_bytes,
            generation=generation,
            tensor_count=len(layout.tensors),
            chunk_count=len(layout.chunks),
        )
    )
    if include_tensors:
        for begin in range(0, len(layout.tensors), TENSORS_PER_PART):
            yield _tensors_part(layout.tensors[begin : begin + TENSORS_PER_PART])
        for begin in range(0, len(layout.attributes), TENSORS_PER_PART):
            attributes = layout.attributes[begin : begin + TENSORS_PER_PART]
            yield peer_pb2.GetManifestResponse(attributes=attributes)
    yield peer_pb2.GetManifestResponse(digests=b"".join(manifest.digests))


def _tensors_part(specs: Sequence[TensorSpec]) -> peer_pb2.GetManifestResponse:
    part = peer_pb2.GetManifestResponse()
    # Most specs share a few types: copying a message takes a fifth of the time of setting its fields.
    spec_types: dict[SpecType, peer_pb2.GetManifestResponse.Tensor] = {}
    for name, dtype, shape, stride, offset in specs:
        spec_type = dtype, shape, stride
        if spec_type not in spec_types:
            spec_types[spec_type] = peer_pb2.GetManifestResponse.Tensor(dtype=dtype, shape=shape, stride=stride)
        tensor = part.tensors.add()
        tensor.CopyFrom(spec_types[spec_type])
        tensor.name, tensor.offset = name, offset
    return part


def manifest_from(parts: Iterable[peer_pb2.GetManifestResponse], local_layout: Layout | None) -> Manifest:
    """Assemble a streamed manifest; `local_layout` replaces the tensors if they were not requested.

    Raises LayoutMismatch (the layout differs from `local_layout`) or SourceCorrupt (inconsistent parts).
    """
    summary: peer_pb2.GetManifestResponse.Summary | None = None
    tensors = TensorSpecTable()
    attributes: list[str] = []
    digests = bytearray()
    for part in parts:
        if part.HasField("summary"):
            summary = part.summary
        tensors.extend(
            TensorSpec(spec.name, spec.dtype, tuple(spec.shape), tuple(spec.stride), spec.offset)
            for spec in part.tensors
        )
        attributes += part.attributes
        digests += part.digests
    if summary is None:
        raise SourceCorrupt("the manifest has no summary")
    layout = Layout(tensors, summary.image_bytes, attributes) if tensors or local_layout is None else local_layout
    if layout.layout_id != summary.layout_id:
        if layout is local_layout:
            raise LayoutMismatch(
                f"the source's layout is {summary.layout_id}, this instance's is {local_layout.layout_id}"
            )
        raise SourceCorrupt("the manifest's tensors do not hash to its layout_id")
    digest_list = tuple(bytes(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES))
    if len(digest_list) != len(layout.chunks) or len(digests) % DIGEST_BYTES:
        raise SourceCorrupt(f"the manifest has {len(digests)} digest bytes for {len(layout.chunks)} chunks")
    manifest = Manifest(layout, digest_list)
    if manifest.weights_id != summary.weights_id:
        raise SourceCorrupt("the manifest's digests do not hash to its weights_id")
    return manifest


def placement_parts(data: bytes) -> Iterator[peer_pb2.GetPlacementResponse]:
    """Yield an encoded placement map in messages."""
    for begin in range(0, len(data), PLACEMENT_PART_BYTES):
        yield peer_pb2.GetPlacementResponse(content=data[begin : begin + PLACEMENT_PART_BYTES])


def placement_from(parts: Iterable[peer_pb2.GetPlacementResponse]) -> bytes:
    """Return an encoded placement map that was sent in messages. Raises SourceCorrupt if it is too large."""
    data = bytearray()
    for part in parts:
        data += part.content
        if len(data) > MAX_PLACEMENT_BYTES:
            raise SourceCorrupt(f"the placement map has more than {MAX_PLACEMENT_BYTES} bytes")
    return bytes(data)


def boxes_parts(boxes: bytes) -> Iterator[peer_pb2.OpenBoxesRequest]:
    """Yield an encoded list of boxes in messages, at least one."""
    for begin in range(0, max(1, len(boxes)), BOXES_PART_BYTES):
        yield peer_pb2.OpenBoxesRequest(content=boxes[begin : begin + BOXES_PART_BYTES])


def check_boxes_size(size: int) -> None:
    """Raise LayoutMismatch if an encoded list of boxes of this size is too large for a request."""
    if size > MAX_BOXES_BYTES:
        raise LayoutMismatch(f"the request for boxes has more than {MAX_BOXES_BYTES} bytes")


def box_image_message(image: BoxImage) -> peer_pb2.OpenBoxesResponse:
    """Return the response to OpenBoxes."""
    return peer_pb2.OpenBoxesResponse(
        model=image.model, version=image.version, layout_id=image.layout_id, image_bytes=image.image_bytes
    )


def box_image_of(message: peer_pb2.OpenBoxesResponse) -> BoxImage:
    """Return the image in the response to OpenBoxes."""
    return BoxImage(message.model, message.version, message.layout_id, message.image_bytes)


def endpoint_message(channel_id: str, endpoint: Endpoint, generation: int) -> peer_pb2.OpenChannelResponse:
    """Return the response to OpenChannel."""
    return peer_pb2.OpenChannelResponse(
        channel_id=channel_id,
        transport=endpoint.transport,
        parameters=dict(endpoint.parameters),
        segment_begin=[segment.begin for segment in endpoint.segments],
        segment_address=[segment.address for segment in endpoint.segments],
        segment_length=[segment.length for segment in endpoint.segments],
        generation=generation,
    )


def endpoint_of(message: peer_pb2.OpenChannelResponse) -> Endpoint:
    """Return the endpoint in the response to OpenChannel. Raises SourceCorrupt for inconsistent lists."""
    lists = (message.segment_begin, message.segment_address, message.segment_length)
    if len({len(numbers) for numbers in lists}) != 1:
        raise SourceCorrupt("the channel's segment lists differ in length")
    segments = tuple(Segment(*numbers) for numbers in zip(*lists, strict=True))
    return Endpoint(message.transport, dict(message.parameters), segments)


def progress_message(progress: Progress, generation: int) -> peer_pb2.WatchProgressResponse:
    """Return a message of the progress stream."""
    activity = progress.storage_activity
    return peer_pb2.WatchProgressResponse(
        chunks=[peer_pb2.WatchProgressResponse.Range(begin=begin, end=end) for begin, end in progress.chunks],
        generation=generation,
        draining=progress.draining,
        digests=b"".join(progress.digests),
        provisional_id=progress.provisional_id or "",
        weights_id=progress.weights_id or "",
        storage_idle_ms=round(activity.idle_s * 1000) if activity is not None else None,
        storage_relayed=activity is not None and activity.relayed,
        rate=progress.rate,
    )


def progress_of(message: peer_pb2.WatchProgressResponse) -> Progress:
    """Parse a message of the progress stream. Raises SourceCorrupt if digests and chunks do not match."""
    chunks = tuple((part.begin, part.end) for part in message.chunks)
    # Compare the counts first: a malicious range may be too large to enumerate.
    if message.digests and len(message.digests) != DIGEST_BYTES * ranges.count(chunks):
        raise SourceCorrupt(f"{len(message.digests)} digest bytes for {ranges.count(chunks)} chunks")
    digests = tuple(message.digests[at : at + DIGEST_BYTES] for at in range(0, len(message.digests), DIGEST_BYTES))
    activity = (
        StorageActivity(message.storage_idle_ms / 1000, message.storage_relayed)
        if message.HasField("storage_idle_ms")
        else None
    )
    return Progress(
        chunks,
        message.draining,
        digests,
        message.provisional_id or None,
        message.weights_id or None,
        activity,
        # A rate of zero would stop this reader for ever, which no source intends.
        max(1, message.rate) if message.HasField("rate") else None,
    )
