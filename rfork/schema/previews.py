"""Wire models of plan previews: predicted transfers of replicas that do not exist yet."""

from __future__ import annotations

from pydantic import Field

from rfork.schema.base import WireModel
from rfork.schema.plans import ChunkAssignment
from rfork.schema.types import (
    Bytes,
    BytesPerSecond,
    ChunkCount,
    Identifier,
    Label,
    ModelName,
    SanitizedText,
    WeightsVersion,
)


class PreviewRequest(WireModel):
    """Request for a preview. It registers, plans and stores nothing."""

    model: ModelName = Field(description="model known to the planner")
    version: WeightsVersion | None = Field(None, description="version of the weights; null: the version that most instances serve")
    rank_key: Label | None = Field(None, description="rank key; null: all known ranks of the model")
    targets: int = Field(1, ge=1, le=1024, description="number of replicas that start together")
    per_host: int = Field(1, ge=1, le=64, description="number of these replicas per host; no other instance runs on these hosts")
    rack: Label | None = Field(None, description="rack of the replicas; null: no known rack")
    zone: Label | None = Field(None, description="zone of the replicas; null: no known zone")
    cold: bool = Field(False, description="assume that no instance has the weights")
    link_bytes_per_s: BytesPerSecond | None = Field(None, gt=0, description="link speed of a host in one direction; null: the fastest measured by forks, or 10 Gbit/s")
    storage_bytes_per_s: BytesPerSecond | None = Field(None, gt=0, description="storage speed per reader; null: as measured, or 1 GB/s")


class PreviewTarget(WireModel):
    """A predicted replica."""

    instance_id: Identifier = Field(description="generated id")
    host: Label = Field(description="generated name")
    shares: tuple[ChunkAssignment, ...] = Field((), description="chunks to read from each source; its own id means its storage")
    transports: dict[Identifier, Label] = Field(default_factory=dict, description="transport for each source; storage has none")
    seconds: float | None = Field(None, description="predicted seconds until it is complete; null: no source, it would load without peers")
    reason: SanitizedText = Field("", description="how its sources were chosen, or why there are none")


class Preview(WireModel):
    """Preview for one rank."""

    model: ModelName = Field(description="the requested model")
    version: WeightsVersion | None = Field(None, description="version of the weights")
    rank_key: Label = Field(description="rank key")
    image_bytes: Bytes = Field(description="size of the image")
    chunk_count: ChunkCount = Field(description="number of chunks of the image")
    seeds: int = Field(description="number of complete instances that can serve; 0 if the request is `cold`")
    link_bytes_per_s: BytesPerSecond = Field(description="assumed link speed of a host in one direction")
    measured: bool = Field(description="whether this speed was measured by forks")
    targets: tuple[PreviewTarget, ...] = Field(description="the predicted replicas")
    seconds: float | None = Field(description="predicted seconds until all replicas with a source are complete")
    storage_bytes_per_s: BytesPerSecond = Field(description="storage speed per reader: as requested, as measured, or 1 GB/s")
    bound_s: float = Field(description="seconds to send one image over one link, the lower bound between hosts")
    storage_bytes: Bytes = Field(description="bytes that all replicas together read from storage")


class PreviewPage(WireModel):
    """Previews of all ranks."""

    items: tuple[Preview, ...] = Field(description="one preview per rank")
