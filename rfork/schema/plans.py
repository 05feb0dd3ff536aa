"""Asking for a plan, and the plan: who reads what from whom."""

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
    SourceKind,
    StorageKind,
    Text,
    Transports,
    WeightsVersion,
)


class SourceFault(WireModel):
    """One source that failed a fork, as the target saw it."""

    instance_id: Identifier = Field(description="the source; the target's own id stands for its storage")
    fault: Literal["user", "target", "source", "network", "storage"] = Field(description="whose fault it is, as far as the target can tell")
    error: Text = Field(max_length=64, description="name of the error class", examples=["SourceTimeout"])
    detail: SanitizedText = Field("", description="what the error says")


class ChunkAssignment(WireModel):
    """Chunks that a target reads from one source; its own instance_id stands for its own storage."""

    source_id: Identifier = Field(description="the source's instance_id")
    chunks: tuple[ChunkRange, ...] = Field(description="in the order of the image")


class ForkRequest(WireModel):
    """Ask for a plan, or for a new one. Carries all it needs: a planner that restarted can answer it."""

    fork_id: Identifier = Field(description="chosen by the target; asking again with it is idempotent")
    instance: InstanceReport = Field(description="the target, in state `loading`, with what it has verified")
    faults: tuple[SourceFault, ...] = Field((), max_length=256, description="sources that failed since the last plan; its own id stands for its own storage")
    current_assignments: tuple[ChunkAssignment, ...] = Field((), max_length=64, description="what it still reads by the plan it has, if it has one")

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        # Not at `ChunkAssignment`, which tells a caller's plan too: the planner must be able to say what it planned.
        if sum(len(share.chunks) for share in self.current_assignments) > MAX_RANGES:
            raise ValueError(f"current has more than {MAX_RANGES} ranges in all")
        return self


class Lease(WireModel):
    """The right to read from one source until it expires."""

    token: Annotated[Text, Field(max_length=4096)] = Field(description="shown to the source with every read")
    expires_in_s: float = Field(description="progress told before renews it")


class Route(WireModel):
    """Chunk ranges to read from one source."""

    source_id: Identifier = Field(description="the source's instance_id")
    kind: SourceKind = Field("peer", description="peer: an instance that is a seed or, as a relay, forks itself")
    address: Label = Field(description="host:port of the source's peer service")
    placement: Placement = Field(description="where the source runs")
    transports: Transports = Field(description="transports both sides offer, best first")
    generation: Generation = Field(description="of the source's weights when it was planned: another by now, and they changed")
    chunks: tuple[ChunkRange, ...] = Field(description="what to read from it; of a relay some may not be there yet")
    lease: Lease = Field(description="the right to do so")


class StorageAssignment(WireModel):
    """Chunks that this target is elected to read from storage, in the stead of all that wait behind it."""

    kind: StorageKind = Field(description="as the target offered it")
    uri: Text = Field("", description="as the target offered it")
    chunks: tuple[ChunkRange, ...] = Field(description="what to read; of a loader all")


class Plan(WireModel):
    """Who reads what from whom. Nothing to read: nobody holds this image; `reason` says what there is instead."""

    fork_id: Identifier = Field(description="of the fork that asked")
    version: WeightsVersion | None = Field(None, description="of the weights that will be there; a target without a version of its own takes this one over")
    weights_id: HexId | None = Field(None, description="digest of the weights that will be there; none: not sealed yet, or nothing to read")
    provisional_id: HexId | None = Field(None, description="origin of the chunks, while the weights are not sealed")
    routes: tuple[Route, ...] = Field((), description="what it reads from other instances")
    storage: tuple[StorageAssignment, ...] = Field((), description="what it reads by itself; of these chunks it is the group's one reader")
    reason: SanitizedText = Field("", description="why there are no routes, or how they were chosen")
    mismatched_source: Route | None = Field(
        None,
        description="an instance that holds this model and rank with another layout, when none holds it with "
        "the target's: its manifest says what differs. Its chunks are empty: nothing is to be read from it",
    )
    retry_after_s: float | None = Field(
        None,
        description="sources exist but have no free slot now: ask again after this; none: asking again is no use",
    )
