"""What instances tell of themselves, and how the planner lists them."""

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
    StorageKind,
    Text,
    Transports,
    WeightsVersion,
)


class Rank(WireModel):
    """Where in a replica one process stands. All but `dp` is part of what is matched.

    Data-parallel replicas hold the same weights, so `dp` tells them apart without parting them.
    """

    tp: RankIndex = Field(0, description="tensor parallel index")
    tp_size: RankSize = Field(1, description="how many tensor parallel ranks a replica has")
    pp: RankIndex = Field(0, description="pipeline stage")
    pp_size: RankSize = Field(1, description="how many pipeline stages a replica has")
    ep: RankIndex = Field(0, description="expert parallel index")
    ep_size: RankSize = Field(1, description="how many expert parallel ranks a replica has")
    dp: RankIndex = Field(0, description="data parallel index; not matched")
    role: Literal["main", "speculative"] = Field(
        "main", description="`main`: the model itself; `speculative`: its draft model for speculative decoding"
    )

    @property
    def key(self) -> str:
        """What must be equal for two ranks to fork from one another."""
        return (
            f"{self.role}-tp{self.tp}of{self.tp_size}-pp{self.pp}of{self.pp_size}-ep{self.ep}of{self.ep_size}"
        )


class Placement(WireModel):
    """Where an instance runs; two with one `host` share a node."""

    host: Label = Field(min_length=1, description="name of its node")
    rack: Label | None = Field(None, description="those with one name share a switch; none: not known")
    zone: Label | None = Field(None, description="those with one name share a datacenter; none: not known")
    nvlink: Label | None = Field(None, description="NVLink domain; those with one name read one another past their NICs")
    pod: Label | None = Field(None, description="the Kubernetes Pod it runs in, for people: namespace/name")


class StorageCandidate(WireModel):
    """Something an instance could read its weights from by itself, if the planner elects it to."""

    kind: StorageKind = Field(description="`snapshot`: any chunk, verified; `checkpoint`: any chunk; `loader`: all or nothing")
    uri: Text = Field("", description="where it lies; of a loader none", examples=["file:///models/smollm2"])
    origin: HexId | None = Field(None, description="what tells these files from others, before any chunk is read; not of a loader")
    weights_id: HexId | None = Field(None, description="of a snapshot, whose manifest is known beforehand")


class InstanceReport(WireModel):
    """All that the planner knows of one rank of an instance: each heartbeat carries it whole."""

    instance_id: Identifier = Field(description="its own at each start")
    model: ModelName = Field(description="name under which seeds and forks meet")
    version: WeightsVersion | None = Field(None, description="which weights of the model these are; forks are between equal versions; none: a target without files of its own, which takes the version that is served")
    any_version: bool = Field(False, description="the version is not the target's own: it was taken over from what is served, and may be replaced as long as no other rank of its replica depends on it")
    replica: Identifier | None = Field(None, description="of which replica it is a rank: all ranks of one replica get one version; none: not known")
    rank: Rank = Field(Rank(), description="which part of the model it holds; forks are between equal ranks")
    layout_id: HexId = Field(description="digest of the names, shapes and types of its tensors; forks are between equal layouts")
    weights_id: HexId | None = Field(None, description="none while a loading instance has not yet learnt it")
    generation: Generation = Field(0, description="raised each time the weights change in place")
    image_bytes: Bytes = Field(description="size of all its tensors, padding included")
    chunk_count: ChunkCount = Field(description="pieces in which the image is read and verified")
    state: InstanceState = Field(description="loading: it gets weights still, and gives on what is verified; serving: it has them; draining: it takes no new readers")
    verified: Chunks = Field((), description="chunks it can give")
    provisional_id: HexId | None = Field(None, description="origin of the files its chunks come from, where these were not sealed yet when it got the first")
    storage: tuple[StorageCandidate, ...] = Field((), max_length=16, description="what it could read by itself, best first")
    address: Label = Field(description="host:port of its gRPC peer service", examples=["10.0.0.7:41234"])
    transports: Transports = Field((), description="transports it offers, best first")
    placement: Placement = Field(description="where it runs")
    max_readers: int = Field(4, ge=0, le=1 << 16, description="forks that may read from it at one time")
    egress_share: float = Field(1.0, gt=0, le=100, description="share of the readers it wants, beside others that say 1")
    egress_rate: int | None = Field(None, gt=0, le=2**63 - 1, description="bytes a second it gives at most")
    readers: tuple[Identifier, ...] = Field((), max_length=4096, description="forks that read from it now")
    has_lease_keys: bool = Field(True, description="whether it has read an answer to its reports: without the keys in it, it refuses every reader")
    clock_skew_s: float | None = Field(None, description="seconds that its clock is ahead of the planner's; none: not known yet")


class InstanceAck(WireModel):
    """The planner's answer to a report."""

    heartbeat_s: float = Field(description="send the next report within this time")
    lease_keys: tuple[Label, ...] = Field(max_length=16, description="keys (base64url) this instance checks lease tokens with; the first is the newest")
    unix_s: float | None = Field(None, description="the planner's time as it answers, in seconds since the epoch")


class InstanceInfo(WireModel):
    """An instance as the planner lists it."""

    report: InstanceReport = Field(description="the last that it sent")
    version: WeightsVersion | None = Field(None, description="of its weights, or of those it is getting; none: not settled yet")
    age_s: float = Field(description="seconds since its last report")
    quarantined: SanitizedText | None = Field(None, description="why it gets no readers, if so")
    accused: SanitizedText | None = Field(None, description="what a reader says it did wrong; that reader avoids it, and all do once readers on two hosts say so")


class InstancePage(WireModel):
    """Some of the instances."""

    items: tuple[InstanceInfo, ...] = Field(description="in the order of their ids")
    next: Identifier | None = Field(None, description="pass as `after` for the next page; none: this is the last")


class ExitCheck(WireModel):
    """Whether an instance may end now; asked by a preStop hook."""

    can_exit: bool = Field(description="whether nobody needs it any more")
    readers: int = Field(description="forks that read from it now")
    reason: SanitizedText = Field(description="why it may not, or why it may")
