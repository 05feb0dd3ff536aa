"""What would happen if replicas came now."""

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
    """Ask who would read what from whom if replicas came now. Nothing is registered, planned or kept."""

    model: ModelName = Field(description="one that the planner knows")
    version: WeightsVersion | None = Field(None, description="of which version; none: the one that most instances serve")
    rank_key: Label | None = Field(None, description="of which rank; none: each that is known of the model")
    targets: int = Field(1, ge=1, le=1024, description="replicas that would come together")
    per_host: int = Field(1, ge=1, le=64, description="how many of them would share a host; no host is one of those known")
    rack: Label | None = Field(None, description="where they would come; none: in no rack that is known")
    zone: Label | None = Field(None, description="where they would come; none: in no zone that is known")
    cold: bool = Field(False, description="as if nobody held the weights yet")
    link_bytes_per_s: BytesPerSecond | None = Field(None, gt=0, description="one direction of a host's link; none: the fastest that its forks measured, or 10 Gbit/s")
    storage_bytes_per_s: BytesPerSecond | None = Field(None, gt=0, description="of storage, for each reader; none: as measured, or 1 GB/s")


class PreviewTarget(WireModel):
    """One of the replicas that would come, and when it would hold everything."""

    instance_id: Identifier = Field(description="made up")
    host: Label = Field(description="made up")
    shares: tuple[ChunkAssignment, ...] = Field((), description="what it would read, by source; its own id stands for its storage")
    transports: dict[Identifier, Label] = Field(default_factory=dict, description="over which each source would be read; storage has none")
    seconds: float | None = Field(None, description="predicted time until it is whole; none: no source is left for it, it would load by itself")
    reason: SanitizedText = Field("", description="how its sources were chosen, or why there are none")


class Preview(WireModel):
    """What would happen to one rank of the replicas."""

    model: ModelName = Field(description="as asked")
    version: WeightsVersion | None = Field(None, description="the version of the weights")
    rank_key: Label = Field(description="the rank")
    image_bytes: Bytes = Field(description="of the rank")
    chunk_count: ChunkCount = Field(description="of the rank")
    seeds: int = Field(description="instances that hold the rank whole and could be read from; with `cold` none")
    link_bytes_per_s: BytesPerSecond = Field(description="what one direction of a host's link was taken to be")
    measured: bool = Field(description="whether that is what its forks measured")
    targets: tuple[PreviewTarget, ...] = Field(description="each replica that would come")
    seconds: float | None = Field(description="predicted time until all that can be are whole")
    storage_bytes_per_s: BytesPerSecond = Field(description="of storage, for each reader: as asked, as measured, or 1 GB/s")
    bound_s: float = Field(description="image bytes over one link: no plan is faster between hosts")
    storage_bytes: Bytes = Field(description="read from storage, by all of them")


class PreviewPage(WireModel):
    """One preview a rank."""

    items: tuple[Preview, ...] = Field(description="by rank")
