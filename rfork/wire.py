"""What instances and the planner say to one another over REST: the models both sides share.

Nothing here imports torch: the planner runs without it. Times are in seconds, sizes in bytes, chunk
ranges are half-open pairs of chunk indices.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rfork.fields import (
    MOST_RANGES,
    Bytes,
    BytesPerSecond,
    ChunkCount,
    ChunkRange,
    Chunks,
    ForkState,
    Generation,
    HexId,
    Identifier,
    InstanceState,
    Label,
    ModelName,
    Outcome,
    Phases,
    RankIndex,
    RankSize,
    Reasons,
    Seconds,
    SourceBytes,
    SourceKind,
    SourceTransports,
    StorageKind,
    Text,
    Told,
    Transports,
)


class WireModel(BaseModel):
    """Base of all wire models: unknown fields and infinite numbers are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Rank(WireModel):
    """Where in a replica one process stands. All but `dp` is part of what is matched.

    Data-parallel replicas hold the same weights, so `dp` tells them apart without parting them.
    """

    tp: RankIndex = Field(0, description="tensor parallel index")
    tp_size: RankSize = 1
    pp: RankIndex = Field(0, description="pipeline stage")
    pp_size: RankSize = 1
    ep: RankIndex = Field(0, description="expert parallel index")
    ep_size: RankSize = 1
    dp: RankIndex = Field(0, description="data parallel index; not matched")
    role: Literal["target", "draft"] = Field(
        "target", description="the model itself, or its speculative draft"
    )

    @property
    def key(self) -> str:
        """What must be equal for two ranks to fork from one another."""
        return (
            f"{self.role}-tp{self.tp}of{self.tp_size}-pp{self.pp}of{self.pp_size}-ep{self.ep}of{self.ep_size}"
        )


class Placement(WireModel):
    """Where an instance runs; two with one `host` share a node."""

    host: Label = Field(min_length=1)
    rack: Label | None = None
    zone: Label | None = None
    nvlink: Label | None = Field(None, description="NVLink domain; those with one name read one another past their NICs")
    pod: Label | None = Field(None, description="the Kubernetes Pod it runs in, for people: namespace/name")


class StorageOffer(WireModel):
    """Something an instance could read its weights from by itself, if the planner elects it to."""

    kind: StorageKind = Field(description="`snapshot`: any chunk, verified; `checkpoint`: any chunk; `loader`: all or nothing")
    uri: Text = Field("", examples=["file:///models/smollm2"])
    origin: HexId | None = Field(None, description="what tells these files from others, before any chunk is read; not of a loader")
    weights_id: HexId | None = Field(None, description="of a snapshot, whose manifest is known beforehand")


class InstanceReport(WireModel):
    """All that the planner knows of one rank of an instance: each heartbeat carries it whole."""

    instance_id: Identifier
    model: ModelName
    rank: Rank = Rank()
    layout_id: HexId
    weights_id: HexId | None = Field(None, description="none while a loading instance has not yet learnt it")
    generation: Generation = Field(0, description="raised each time the weights change in place")
    image_bytes: Bytes
    chunk_count: ChunkCount
    state: InstanceState
    verified: Chunks = Field((), description="chunks it can give")
    draft: HexId | None = Field(None, description="origin of the files its chunks come from, where these were not sealed yet when it got the first")
    storage: tuple[StorageOffer, ...] = Field((), max_length=16, description="what it could read by itself, best first")
    address: Label = Field(description="host:port of its gRPC peer service", examples=["10.0.0.7:41234"])
    transports: Transports = Field((), description="transports it offers, best first")
    placement: Placement
    max_readers: int = Field(4, ge=0, le=1 << 16)
    weight: float = Field(1.0, gt=0, le=100, description="share of the readers it wants, beside others that say 1")
    egress_rate: int | None = Field(None, gt=0, le=2**63 - 1, description="bytes a second it gives at most")
    readers: tuple[Identifier, ...] = Field((), max_length=4096, description="forks that read from it now")


class InstanceAck(WireModel):
    """The planner's answer to a report."""

    heartbeat_s: float = Field(description="send the next report within this time")
    lease_keys: tuple[Label, ...] = Field(max_length=16, description="keys (base64url) this instance checks lease tokens with; the first is the newest")


class InstanceView(WireModel):
    """An instance as the planner lists it."""

    report: InstanceReport
    age_s: float = Field(description="seconds since its last report")
    quarantined: Told | None = Field(None, description="why it gets no readers, if so")


class SourceFault(WireModel):
    """One source that failed a fork, as the target saw it."""

    instance_id: Identifier
    fault: Literal["user", "target", "source", "network", "storage"]
    error: Text = Field(max_length=64, description="name of the error class", examples=["SourceStalled"])
    detail: Told = ""


class Share(WireModel):
    """Chunks that a target reads from one source; its own instance_id stands for its own storage."""

    source_id: Identifier
    chunks: tuple[ChunkRange, ...]


class ForkRequest(WireModel):
    """Ask for a plan, or for a new one. Carries all it needs: a planner that restarted can answer it."""

    fork_id: Identifier = Field(description="chosen by the target; asking again with it is idempotent")
    instance: InstanceReport = Field(description="the target, in state `loading`, with what it has verified")
    faults: tuple[SourceFault, ...] = Field((), max_length=256, description="sources that failed since the last plan; its own id stands for its own storage")
    current: tuple[Share, ...] = Field((), max_length=64, description="what it still reads by the plan it has, if it has one")

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        # Not at `Share`, which tells a caller's plan too: the planner must be able to say what it planned.
        if sum(len(share.chunks) for share in self.current) > MOST_RANGES:
            raise ValueError(f"current has more than {MOST_RANGES} ranges in all")
        return self


class Lease(WireModel):
    """The right to read from one source until it expires."""

    token: Annotated[Text, Field(max_length=4096)] = Field(description="shown to the source with every read")
    expires_in_s: float


class Route(WireModel):
    """Chunk ranges to read from one source."""

    source_id: Identifier = Field(description="the source's instance_id")
    kind: SourceKind = "peer"
    address: Label = Field(description="host:port of the source's peer service")
    placement: Placement
    transports: Transports = Field(description="transports both sides offer, best first")
    generation: Generation
    chunks: tuple[ChunkRange, ...]
    lease: Lease


class StorageRead(WireModel):
    """Chunks that this target is elected to read from storage, in the stead of all that wait behind it."""

    kind: StorageKind
    uri: Text = ""
    chunks: tuple[ChunkRange, ...]


class Plan(WireModel):
    """Who reads what from whom. Nothing to read: nobody holds this image; `reason` says what there is instead."""

    fork_id: Identifier
    weights_id: HexId | None = None
    draft: HexId | None = Field(None, description="origin of the chunks, while the weights are not sealed")
    routes: tuple[Route, ...] = ()
    storage: tuple[StorageRead, ...] = Field((), description="what it reads by itself; of these chunks it is the group's one reader")
    reason: Told = Field("", description="why there are no routes, or how they were chosen")
    other_layout: Route | None = Field(
        None,
        description="an instance that holds this model and rank with another layout, when none holds it with "
        "the target's: its manifest says what differs. Its chunks are empty: nothing is to be read from it",
    )
    retry_after_s: float | None = Field(
        None,
        description="sources exist but have no place now: ask again after this; none: asking again is no use",
    )


class ForkProgress(WireModel):
    """What a target tells the planner about once a second."""

    verified: Chunks
    bytes_read: Bytes
    bytes_per_s: BytesPerSecond
    sources: SourceBytes = Field(default_factory=dict, description="verified bytes by source: an instance, or `KIND:URI` for storage")
    link_bytes_per_s: BytesPerSecond | None = Field(None, description="bytes a second in its fastest second, which stands for its link; none: not known yet")
    transports: SourceTransports = Field(default_factory=dict, description="over which each source is read last; storage has none")
    phases: Phases = Field(default_factory=dict, description="seconds in each phase so far, in the order in which they began: the last one goes on")


class ProgressAck(WireModel):
    """Renewed leases, by source instance."""

    leases: dict[Identifier, Lease] = Field(default_factory=dict)
    ask_again: Told | None = Field(None, description="why the planner has a better plan by now: ask for it; none: go on")


class ForkFinish(WireModel):
    """How a fork ended."""

    outcome: Outcome
    seconds: Seconds
    bytes_read: Bytes
    sources: SourceBytes = Field(default_factory=dict, description="verified bytes by source")
    fallback: Told | None = Field(None, description="what was loaded instead, if a fallback was")
    reasons: Reasons = Field((), description="each failure on the way, one line; the last 64 count")
    efficiency: float | None = Field(None, ge=0, le=1e9, description="(S/B)/T: image bytes over the transfer's seconds, against the fastest second's rate")
    bytes_repeated: Bytes = Field(0, description="bytes that had to be read again")
    replans: int = Field(0, ge=0, le=1 << 20, description="how often it was planned again")
    link_bytes_per_s: BytesPerSecond | None = Field(None, description="bytes a second in its fastest second, which stands for its link; none: not known")
    transports: SourceTransports = Field(default_factory=dict, description="over which each source was read last; storage has none")
    phases: Phases = Field(default_factory=dict, description="seconds in each phase, in the order in which they began")


class ForkView(WireModel):
    """A fork as the planner lists it."""

    fork_id: Identifier
    instance_id: Identifier
    model: ModelName
    rank: Rank
    state: ForkState
    plan: tuple[Share, ...] = ()
    reason: Told = Field("", description="how the sources were chosen, or why there are none")
    progress: ForkProgress | None = None
    finish: ForkFinish | None = None
    held: dict[Identifier, int] = Field(default_factory=dict, description="bytes a second that a source it reads (or read last) from held all its readers to, where it did")
    age_s: float = Field(description="seconds since it first asked")
    chunk_count: ChunkCount
    image_bytes: Bytes


class MayExit(WireModel):
    """Whether an instance may end now; asked by a preStop hook."""

    may_exit: bool
    readers: int = Field(description="forks that read from it now")
    reason: Told = Field(description="why it may not, or why it may")


class InstancePage(WireModel):
    """Some of the instances."""

    items: tuple[InstanceView, ...]
    next: Identifier | None = Field(None, description="pass as `after` for the next page; none: this is the last")


class ForkPage(WireModel):
    """Some of the forks."""

    items: tuple[ForkView, ...]
    next: Identifier | None = Field(None, description="pass as `after` for the next page; none: this is the last")


class ScaleUp(WireModel):
    """New replicas of a model are about to start: their forks are to share one plan."""

    scaleup_id: Identifier = Field(description="chosen by the caller; saying it again replaces what was said before")
    model: ModelName
    replicas: int = Field(ge=0, le=100_000, description="new replicas that have not asked for their fork yet; 0: none comes any more")
    expires_in_s: float = Field(900.0, gt=0, le=86_400, description="who has not come by then is not waited for")
    by: Label = Field("", description="who says so, for people", examples=["deployment/default/llama"])


class ScaleUpView(WireModel):
    """A scale-up that was announced, and what awaits those that come."""

    scaleup: ScaleUp
    arrived: int = Field(description="replicas of which a rank has asked for its fork since")
    expires_in_s: float
    seeds: int = Field(description="instances that hold the model whole now, of the rank that fewest hold")
    image_bytes: Bytes = Field(description="of all ranks of one replica, where any is known; else 0")
    reason: Told = Field(description="what they will do: fork from seeds, or read storage once for all")


class PreviewRequest(WireModel):
    """Ask who would read what from whom if replicas came now. Nothing is registered, planned or kept."""

    model: ModelName
    rank_key: Label | None = Field(None, description="of which rank; none: each that is known of the model")
    targets: int = Field(1, ge=1, le=1024, description="replicas that would come together")
    per_host: int = Field(1, ge=1, le=64, description="how many of them would share a host; no host is one of those known")
    rack: Label | None = None
    zone: Label | None = None
    cold: bool = Field(False, description="as if nobody held the weights yet")
    link_bytes_per_s: BytesPerSecond | None = Field(None, gt=0, description="one direction of a host's link; none: the fastest that its forks measured, or 10 Gbit/s")
    storage_bytes_per_s: BytesPerSecond | None = Field(None, gt=0, description="of storage, for each reader; none: as measured, or 1 GB/s")


class PreviewTarget(WireModel):
    """One of the replicas that would come, and when it would hold everything."""

    instance_id: Identifier
    host: Label
    shares: tuple[Share, ...] = Field((), description="what it would read, by source; its own id stands for its storage")
    seconds: float | None = Field(None, description="predicted time until it is whole; none: no source is left for it, it would load by itself")
    reason: Told = ""


class Preview(WireModel):
    """What would happen to one rank of the replicas."""

    model: ModelName
    rank_key: Label
    image_bytes: Bytes
    chunk_count: ChunkCount
    seeds: int
    link_bytes_per_s: BytesPerSecond
    measured: bool = Field(description="whether that is what its forks measured")
    targets: tuple[PreviewTarget, ...]
    seconds: float | None = Field(description="predicted time until all that can be are whole")
    bound_s: float = Field(description="image bytes over one link: no plan is faster between hosts")
    storage_bytes: Bytes = Field(description="read from storage, by all of them")


class PreviewPage(WireModel):
    """One preview a rank."""

    items: tuple[Preview, ...]


class ForkEvent(WireModel):
    """One change of a fork, as the event stream tells it."""

    kind: Literal["planned", "progress", "ended"]
    fork: ForkView


class ModelView(WireModel):
    """What the fleet holds of one model and rank."""

    model: ModelName
    rank_key: Label
    layout_id: HexId
    weights_id: HexId | None
    image_bytes: Bytes
    seeds: int
    relays: int
    forks_running: int
    storage_bytes: int = Field(0, description="bytes that forks of this rank read from storage since its first instance came; forgotten with its last")
    forked_bytes: int = Field(0, description="bytes that they read from one another")
    storage_s: float | None = Field(None, description="median seconds of the last forks that read it all from storage; none: none did")
    fork_s: float | None = Field(None, description="median seconds of the last forks that read it all from one another")
    saved_s: float = Field(0, description="seconds that forks from one another took less, in all, than `storage_s` each; below 0: more")


def source_kind(name: str) -> SourceKind:
    """The kind of a source by its name in `sources`: `KIND:URI` for storage, an instance_id for a peer."""
    before = name.partition(":")[0]
    for kind in get_args(StorageKind):
        if before == kind:
            return cast(StorageKind, kind)
    return "peer"


class Problem(BaseModel):
    """RFC 9457 problem document; `type` ends in a word that is stable across releases."""

    model_config = ConfigDict(extra="allow")

    type: Told = Field(examples=["https://rfork.dev/problems/unknown-fork"])
    title: Told
    status: int
    detail: Told
    instance: Told | None = None
