"""Wire models of plan requests and plans."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rfork.schema.base import WireModel
from rfork.schema.instances import InstanceReport, Placement
from rfork.schema.types import (
    MAX_RANGES,
    ChunkRange,
    Generation,
    HexId,
    Identifier,
    Label,
    SanitizedText,
    SourceType,
    StorageType,
    Text,
    Transports,
    WeightsVersion,
)


class SourceFault(WireModel):
    """A source that failed, as seen by the target."""

    instance_id: Identifier = Field(description="the source; the target's own id means its storage")
    fault: Literal["user", "target", "source", "network", "storage"] = Field(description="responsible party, as far as the target can determine")
    error: Text = Field(max_length=64, description="name of the error class", examples=["SourceTimeout"])
    detail: SanitizedText = Field("", description="error message")


class ChunkAssignment(WireModel):
    """Chunks that a target reads from one source. The target's own id means its storage."""

    source_id: Identifier = Field(description="instance id of the source")
    chunks: tuple[ChunkRange, ...] = Field(description="chunk ranges in image order")


class ForkRequest(WireModel):
    """Request for a plan or a replan. Self-contained, so that a restarted planner can answer it."""

    fork_id: Identifier = Field(description="chosen by the target; repeated requests with one id are idempotent")
    instance: InstanceReport = Field(description="the target, in state `loading`, with its verified chunks")
    faults: tuple[SourceFault, ...] = Field((), max_length=256, description="sources that failed since the last plan; the target's own id means its storage")
    current_assignments: tuple[ChunkAssignment, ...] = Field((), max_length=64, description="chunks that it is still reading by its current plan")

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        # Checked here and not in `ChunkAssignment`, because the planner's own plans may exceed the limit.
        if sum(len(share.chunks) for share in self.current_assignments) > MAX_RANGES:
            raise ValueError(f"current_assignments has more than {MAX_RANGES} ranges in total")
        return self


class Lease(WireModel):
    """The right to read from one source until it expires."""

    token: Annotated[Text, Field(max_length=4096)] = Field(description="sent to the source with every read")
    expires_in_s: float = Field(description="seconds until it expires; a progress report renews it")


class Route(WireModel):
    """Chunk ranges to read from one source."""

    source_id: Identifier = Field(description="instance id of the source")
    kind: SourceType = Field("peer", description="`peer`: a seed or a relay")
    address: Label = Field(description="host:port of the source's peer service")
    placement: Placement = Field(description="location of the source")
    transports: Transports = Field(description="transports that both sides support, best first")
    generation: Generation = Field(description="generation of the source's weights in this plan; a different one means that they changed")
    chunks: tuple[ChunkRange, ...] = Field(description="chunks to read; a relay may not have all of them yet")
    lease: Lease = Field(description="lease for this source")


class StorageAssignment(WireModel):
    """Chunks that this target reads from storage for all waiting targets."""

    kind: StorageType = Field(description="as offered by the target")
    uri: Text = Field("", description="as offered by the target")
    chunks: tuple[ChunkRange, ...] = Field(description="chunks to read; all for a loader")


class Plan(WireModel):
    """A plan: the sources of a target. If it is empty, no instance has the image and `reason` states why."""

    fork_id: Identifier = Field(description="fork of the request")
    version: WeightsVersion | None = Field(None, description="version of the planned weights; adopted by a target without a version")
    weights_id: HexId | None = Field(None, description="digest of the planned weights; null: not known yet, or nothing to read")
    provisional_id: HexId | None = Field(None, description="fingerprint of the source files, while the manifest is not final")
    routes: tuple[Route, ...] = Field((), description="chunks to read from other instances")
    storage: tuple[StorageAssignment, ...] = Field((), description="chunks to read from storage, as the only reader of the group")
    reason: SanitizedText = Field("", description="how the sources were chosen, or why there are none")
    mismatched_source: Route | None = Field(
        None,
        description="instance with this model and rank but another layout, if none has the target's: its manifest shows the "
        "difference. It has no chunks: do not read from it",
    )
    retry_after_s: float | None = Field(
        None,
        description="all sources are busy: seconds until the next request; null: a retry is useless",
    )
