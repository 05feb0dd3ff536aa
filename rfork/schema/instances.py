"""Wire models of instances: their reports, and the planner's records."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rfork.schema.base import WireModel
from rfork.schema.types import (
    Bytes,
    ChunkCount,
    Chunks,
    Generation,
    HexId,
    Identifier,
    InstanceState,
    Label,
    ModelName,
    RankIndex,
    RankSize,
    SanitizedText,
    StorageType,
    Text,
    Transports,
    WeightsVersion,
)


class Rank(WireModel):
    """Position of a process within a replica. All fields except `dp` must match between source and target.

    Data-parallel replicas have the same weights, so they can fork from each other.
    """

    tp: RankIndex = Field(0, description="tensor parallel index")
    tp_size: RankSize = Field(1, description="number of tensor parallel ranks")
    pp: RankIndex = Field(0, description="pipeline stage")
    pp_size: RankSize = Field(1, description="number of pipeline stages")
    ep: RankIndex = Field(0, description="expert parallel index")
    ep_size: RankSize = Field(1, description="number of expert parallel ranks")
    dp: RankIndex = Field(0, description="data parallel index; not matched")
    role: Literal["main", "speculative"] = Field(
        "main", description="`main`: the model itself; `speculative`: its draft model for speculative decoding"
    )

    @property
    def key(self) -> str:
        """Key that two ranks must share to fork from each other."""
        return (
            f"{self.role}-tp{self.tp}of{self.tp_size}-pp{self.pp}of{self.pp_size}-ep{self.ep}of{self.ep_size}"
        )


class Placement(WireModel):
    """Location of an instance. Instances with the same `host` share a node."""

    host: Label = Field(min_length=1, description="name of the node")
    rack: Label | None = Field(None, description="name of the rack; instances with the same rack share a switch; null: unknown")
    zone: Label | None = Field(None, description="name of the zone; instances with the same zone share a datacenter; null: unknown")
    nvlink: Label | None = Field(None, description="NVLink domain; instances in the same domain read from each other over NVLink; null: unknown")
    pod: Label | None = Field(None, description="Kubernetes Pod, as namespace/name; for display")


class StorageCandidate(WireModel):
    """Storage from which an instance can read its weights if the planner elects it."""

    kind: StorageType = Field(description="`snapshot`: any chunk, verified; `checkpoint`: any chunk; `loader`: all or nothing")
    uri: Text = Field("", description="location; empty for a loader", examples=["file:///models/smollm2"])
    origin: HexId | None = Field(None, description="fingerprint of the files, known before any chunk is read; null for a loader")
    weights_id: HexId | None = Field(None, description="digest of the weights, if known from a snapshot's manifest")


class InstanceReport(WireModel):
    """State of one rank of an instance, sent completely with each heartbeat."""

    instance_id: Identifier = Field(description="new at each start")
    model: ModelName = Field(description="name of the model")
    version: WeightsVersion | None = Field(None, description="version of the weights; only equal versions fork from each other; null: a target without files, which adopts the version that is served")
    any_version: bool = Field(False, description="the version was adopted from the fleet, and may be replaced unless another rank of the replica depends on it")
    replica: Identifier | None = Field(None, description="replica that this rank belongs to: all its ranks get one version; null: unknown")
    rank: Rank = Field(Rank(), description="part of the model; only equal ranks fork from each other")
    layout_id: HexId = Field(description="digest of the names, shapes and types of the tensors; only equal layouts fork from each other")
    weights_id: HexId | None = Field(None, description="digest of the weights; null: not known yet")
    generation: Generation = Field(0, description="increased whenever the weights change in place")
    image_bytes: Bytes = Field(description="size of all tensors, including padding")
    chunk_count: ChunkCount = Field(description="number of chunks of the image")
    state: InstanceState = Field(description="`loading`: receives weights and serves verified chunks; `serving`: complete; `draining`: accepts no new readers")
    verified: Chunks = Field((), description="chunks it can serve")
    provisional_id: HexId | None = Field(None, description="fingerprint of the files its chunks come from, if the manifest was not final when the first chunk arrived")
    storage: tuple[StorageCandidate, ...] = Field((), max_length=16, description="storage that it can read, best first")
    address: Label = Field(description="host:port of its gRPC peer service", examples=["10.0.0.7:41234"])
    transports: Transports = Field((), description="offered transports, best first")
    placement: Placement = Field(description="location of the instance")
    max_readers: int = Field(4, ge=0, le=1 << 16, description="maximum number of concurrent readers")
    egress_share: float = Field(1.0, gt=0, le=100, description="weight of this source when readers are distributed; 1 is normal")
    egress_rate: int | None = Field(None, gt=0, le=2**63 - 1, description="maximum bytes per second to all readers together")
    readers: tuple[Identifier, ...] = Field((), max_length=4096, description="forks that currently read from it")
    has_lease_keys: bool = Field(True, description="whether it has received lease keys; without them it rejects all readers")
    clock_skew_s: float | None = Field(None, description="seconds by which its clock is ahead of the planner's; null: unknown")


class InstanceAck(WireModel):
    """Response to an instance report."""

    heartbeat_s: float = Field(description="send the next report within this time")
    lease_keys: tuple[Label, ...] = Field(max_length=16, description="keys (base64url) for verifying lease tokens, newest first")
    unix_s: float | None = Field(None, description="the planner's time, in seconds since the epoch")


class InstanceInfo(WireModel):
    """The planner's record of an instance."""

    report: InstanceReport = Field(description="its latest report")
    version: WeightsVersion | None = Field(None, description="version of its weights, or of those it receives; null: not determined yet")
    age_s: float = Field(description="seconds since its latest report")
    quarantined: SanitizedText | None = Field(None, description="why it gets no readers; null: not quarantined")
    accused: SanitizedText | None = Field(None, description="fault reported by a reader, which then avoids it; reports from two hosts quarantine it")


class InstancePage(WireModel):
    """A page of instances."""

    items: tuple[InstanceInfo, ...] = Field(description="sorted by id")
    next: Identifier | None = Field(None, description="pass as `after` to get the next page; null: last page")


class ExitCheck(WireModel):
    """True if an instance may exit now, for preStop hooks."""

    can_exit: bool = Field(description="whether the instance may exit")
    readers: int = Field(description="number of forks that currently read from it")
    reason: SanitizedText = Field(description="why it may or may not exit")
