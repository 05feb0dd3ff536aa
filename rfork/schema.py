"""REST models shared by instances and the planner.

Does not import torch: the planner runs without it. Times are in seconds, sizes in bytes; chunk ranges are half-open
pairs of chunk indices. All field types are bounded, so that the planner can store and forward their values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, cast, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

MAX_CHUNKS: Final = 1 << 20
"""Chunks of an image: 4 TB in chunks of 4 MiB, for one rank."""
MAX_RANGES: Final = 4096
"""Ranges in one list of chunks."""
MAX_SOURCES: Final = 4096
MAX_TRANSPORTS: Final = 64
"""Sources whose transport a fork reports: those with most bytes."""
MAX_RATES: Final = 64
"""Sources whose rate a fork reports: the fastest."""
MAX_KEY_CHARS: Final = 1 << 17
"""Total length of the names of all sources that a fork reports."""
MAX_TEXT_LENGTH: Final = 1000
"""Maximum length of an error text."""
MAX_REASONS: Final = 64
MAX_LAYOUT_PARTS: Final = 64
"""Parts that a fork across layouts reports: the largest."""
SAME_HOST_TRANSPORTS: Final = frozenset({"cuda_ipc", "shared_memory"})
"""Transports between two processes on one host."""
GPU_KERNEL_TRANSPORTS: Final = frozenset({"nccl"})
"""Transports that run kernels on the source's GPU and so compete with its requests."""
OPT_IN_TRANSPORTS: Final = frozenset({"nixl", "nccl", "gloo"})
"""Transports used only if requested, because their libraries do not authenticate peers."""
PRINTABLE: Final = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def sanitize_text(value: object) -> object:
    """Convert text to one line of at most `MAX_TEXT_LENGTH` characters; pydantic rejects other values."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_TEXT_LENGTH:
        value = value[: MAX_TEXT_LENGTH - 1] + "…"
    return value if value.isprintable() else _UNPRINTABLE.sub(" ", value)


def _keep_last(value: object) -> object:
    """Keep only the last reasons, which explain the outcome."""
    return value[-MAX_REASONS:] if isinstance(value, list | tuple) else value


def _limit_key_length(sources: dict[str, int]) -> dict[str, int]:
    """Reject names that are too long together, because a planner stores those of thousands of forks."""
    if sum(map(len, sources)) > MAX_KEY_CHARS:
        raise ValueError(f"the names of all sources have more than {MAX_KEY_CHARS} characters")
    return sources


Text = Annotated[str, Field(max_length=2048, pattern=PRINTABLE)]
"""Text that can be forwarded: bounded, without control characters and surrogates."""
Label = Annotated[Text, Field(max_length=256)]
SanitizedText = Annotated[str, BeforeValidator(sanitize_text)]
"""Error text: sanitised instead of rejected, so that no report is lost."""
Identifier = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]
ModelName = Annotated[
    Text, Field(min_length=1, max_length=512, examples=["HuggingFaceTB/SmolLM2-135M-Instruct"])
]
WeightsVersion = Annotated[
    Text, Field(min_length=1, max_length=256, examples=["files:9f86d081884c7d659a2feaa0c55ad015"])
]
"""Version of a model's weights: as stated, or ``commit:``, ``files:`` or ``weights:`` with hex digits."""
HexId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", examples=["9f86d081884c7d659a2feaa0c55ad015"])]
SourceName = Annotated[Text, Field(min_length=1, max_length=2064)]
"""Instance id, or `KIND:URI` of storage."""
Bytes = Annotated[int, Field(ge=0, le=2**63 - 1)]
BytesPerSecond = Annotated[float, Field(ge=0, le=float(2**63))]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Generation = Annotated[int, Field(ge=0, le=2**63 - 1)]
ChunkCount = Annotated[int, Field(ge=0, le=MAX_CHUNKS)]
RankIndex = Annotated[int, Field(ge=0, le=1 << 20)]
RankSize = Annotated[int, Field(ge=1, le=1 << 20)]
ChunkRange = Annotated[
    tuple[ChunkCount, ChunkCount], Field(description="half-open range of chunk indices", examples=[(0, 64)])
]
Chunks = Annotated[tuple[ChunkRange, ...], Field(max_length=MAX_RANGES)]
Transports = Annotated[tuple[Label, ...], Field(max_length=16)]
SourceBytes = Annotated[dict[SourceName, Bytes], Field(max_length=MAX_SOURCES), AfterValidator(_limit_key_length)]
Phases = Annotated[dict[Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")], Seconds], Field(max_length=16)]
"""Seconds by phase, in the order in which they began."""
SourceRates = Annotated[dict[SourceName, BytesPerSecond], Field(max_length=MAX_RATES)]
SourceTransports = Annotated[dict[SourceName, Label], Field(max_length=MAX_TRANSPORTS)]
Reasons = Annotated[tuple[SanitizedText, ...], BeforeValidator(_keep_last)]
InstanceState = Literal["loading", "serving", "draining"]
ForkState = Literal["planning", "running", "finished", "failed"]
Outcome = Literal["forked", "fallback", "failed", "interrupted"]
SourceType = Literal["peer", "snapshot", "checkpoint", "loader"]
StorageType = Literal["snapshot", "checkpoint", "loader"]

VERSION_HEADER = "Rfork-Version"
"""Header of the planner's responses with its rfork release."""


class StrictCopyModel(BaseModel):
    """Model whose copies reject updates of fields that do not exist; pydantic ignores them silently."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, which are not validated. Raises TypeError for an unknown field."""
        if update and (unknown := update.keys() - type(self).model_fields.keys()):
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)


class WireModel(StrictCopyModel):
    """Base of all wire models: immutable; rejects unknown fields and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
    holder: Identifier | None = Field(None, description="holder that keeps this image without an engine; null: an engine")


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


class ModelInfo(WireModel):
    """A model in the fleet, with one entry for each combination of version, rank key, layout and weights."""

    model: ModelName = Field(description="name of the model")
    version: WeightsVersion | None = Field(None, description="version of the weights; null: targets whose version is not determined yet")
    rank_key: Label = Field(description="rank key")
    layout_id: HexId = Field(description="id of the layout")
    weights_id: HexId | None = Field(description="digest of the weights; null: not known yet")
    image_bytes: Bytes = Field(description="size of the image")
    seeds: int = Field(description="number of complete instances, those of holders included")
    holders: int = Field(0, description="number of those seeds that holders keep without an engine")
    relays: int = Field(description="number of instances that are still receiving and serve verified chunks")
    forks_running: int = Field(description="number of running forks")
    storage_bytes: int = Field(0, description="bytes that forks of this rank read from storage; kept for a while after its last instance has left")
    forked_bytes: int = Field(0, description="bytes that forks of this rank read from peers")
    storage_s: float | None = Field(None, description="median seconds of recent forks that read only from storage; null: none")
    fork_s: float | None = Field(None, description="median seconds of recent forks that read only from peers; null: none")
    seconds_saved: float = Field(0, description="total seconds by which recent forks from peers were faster than `storage_s`; negative: slower")


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
    is_paused: bool = Field(False, description="a prefetch must not read until its next plan, because engines need its sources")
    own_load_s: Seconds | None = Field(None, description="duration of recent loads of these weights by an engine's loader or another fallback; null: unknown")


class ForkProgress(WireModel):
    """Progress of a fork, reported by the target about once a second."""

    verified: Chunks = Field(description="verified chunks")
    bytes_read: Bytes = Field(description="bytes of all chunks received so far, valid or not")
    bytes_per_s: BytesPerSecond = Field(description="current rate in bytes per second: over the last second, at first the mean so far")
    sources: SourceBytes = Field(default_factory=dict, description="verified bytes by source: instance id, or `KIND:URI` of storage")
    source_bytes_per_s: SourceRates = Field(default_factory=dict, description="current rate of each source in verified bytes per second; only the 64 fastest active sources")
    active_bytes_per_s: BytesPerSecond | None = Field(None, description="current rate over the network while chunks were being read from peers: time spent waiting for sources does not count; null: unknown")
    source_active_bytes_per_s: SourceRates = Field(default_factory=dict, description="same as `active_bytes_per_s`, by peer: an upper bound until its first chunk arrives; only the 64 fastest peers")
    link_bytes_per_s: BytesPerSecond | None = Field(None, description="peak rate in bytes per second, the estimate of the link's speed; null: unknown")
    transports: SourceTransports = Field(default_factory=dict, description="last transport used for each source; storage has none")
    phases: Phases = Field(default_factory=dict, description="seconds in each phase so far, in order; the last phase is still running")


class ProgressAck(WireModel):
    """Response to a progress report: renewed leases."""

    leases: dict[Identifier, Lease] = Field(default_factory=dict, description="renewed lease by source; replaces the previous one")
    replan_suggested: SanitizedText | None = Field(None, description="why the planner has a better plan, so that the target should request one; null: continue")


class LayoutPart(WireModel):
    """Boxes that a fork across layouts read from one rank of another layout."""

    rank_key: Label = Field(description="rank key of the source")
    layout_id: HexId = Field(description="id of the source's layout")
    host: Label = Field(description="host of the instance that sent most of it")
    instance_id: SourceName = Field(description="that instance, of the model `MODEL#boxes`")
    boxes: int = Field(ge=0, le=1 << 20, description="number of boxes of checkpoint tensors")
    bytes_read: Bytes = Field(description="bytes received")
    seconds: Seconds = Field(description="duration, including the source's gather of the boxes")


class CrossLayoutResult(WireModel):
    """Origin and durations of weights that a fork across layouts read."""

    needed_bytes: Bytes = Field(description="bytes of the boxes that the target needs")
    parts: tuple[LayoutPart, ...] = Field(max_length=MAX_LAYOUT_PARTS, description="the largest parts, by size")
    failures: Reasons = Field((), description="layouts that failed and were replaced, one line each; only the last 64 are kept")
    record_s: Seconds = Field(description="seconds to find the sources and to record the target's placement map")
    transfer_s: Seconds = Field(description="seconds to fetch the boxes, including what the loader waited for")
    load_s: Seconds = Field(description="seconds of the engine's own loader without that wait")


class ForkResult(WireModel):
    """Final report of a fork."""

    outcome: Outcome = Field(description="`forked`: loaded by the plan, from peers or from storage that it was elected to read; `fallback`: loaded without peers; `failed`: not loaded; `interrupted`: stopped before the end")
    seconds: Seconds = Field(description="duration of the entire fork, including waits")
    bytes_read: Bytes = Field(description="bytes of all chunks received, valid or not")
    sources: SourceBytes = Field(default_factory=dict, description="verified bytes by source")
    fallback: SanitizedText | None = Field(None, description="fallback that loaded the weights; null: none")
    cross_layout: CrossLayoutResult | None = Field(None, description="what came from which other layout, if the fallback read from these; null: none")
    reasons: Reasons = Field((), description="failures, one line each, in order; only the last 64 are kept")
    efficiency: float | None = Field(None, ge=0, le=1e9, description="minimum transfer time at the peak rate, divided by the actual transfer time")
    bytes_repeated: Bytes = Field(0, description="bytes read more than once")
    replans: int = Field(0, ge=0, le=1 << 20, description="number of replans")
    link_bytes_per_s: BytesPerSecond | None = Field(None, description="peak rate in bytes per second, the estimate of the link's speed; null: unknown")
    source_bytes_per_s: SourceRates = Field(default_factory=dict, description="peak rate of each source in verified bytes per second; only the 64 fastest sources, and none for a fork shorter than a second")
    transports: SourceTransports = Field(default_factory=dict, description="last transport used for each source; storage has none")
    phases: Phases = Field(default_factory=dict, description="seconds in each phase, in order")


class ForkInfo(WireModel):
    """The planner's record of a fork."""

    fork_id: Identifier = Field(description="chosen by the target")
    instance_id: Identifier = Field(description="the target")
    model: ModelName = Field(description="model of the target")
    version: WeightsVersion | None = Field(None, description="version of the weights; null: not determined yet")
    rank: Rank = Field(description="rank of the target")
    state: ForkState = Field(description="`planning`: no plan yet; `running`: has a plan; `finished`: the target has its weights, forked or from a fallback; `failed`: it has none, or was lost")
    plan: tuple[ChunkAssignment, ...] = Field((), description="chunks to read from each source, by the latest plan")
    reason: SanitizedText = Field("", description="how the sources were chosen, or why there are none")
    progress: ForkProgress | None = Field(None, description="latest progress report; null: none yet")
    finish: ForkResult | None = Field(None, description="final report; null: still running, or the target was lost")
    source_rate_limits: dict[Identifier, int] = Field(default_factory=dict, description="current or last rate limit of each throttled source, in bytes per second for all its readers together")
    age_s: float = Field(description="seconds since the first request")
    chunk_count: ChunkCount = Field(description="number of chunks of the image")
    image_bytes: Bytes = Field(description="size of the image")
    holder: Identifier | None = Field(None, description="holder that fetches the image without an engine; null: an engine")


class ForkPage(WireModel):
    """A page of forks."""

    items: tuple[ForkInfo, ...] = Field(description="sorted by id")
    next: Identifier | None = Field(None, description="pass as `after` to get the next page; null: last page")


class ImageSelector(WireModel):
    """Weights that a holder is to keep, in every layout that instances of this model have."""

    model: ModelName = Field(description="name of the model")
    version: WeightsVersion | None = Field(None, description="version of the weights; null: the version that most instances serve")


class HeldImage(WireModel):
    """An image that a holder keeps or fetches. As a source, it is an instance of its own."""

    instance_id: Identifier = Field(description="its instance")
    model: ModelName = Field(description="name of the model")
    version: WeightsVersion | None = Field(None, description="version of the weights; null: not known yet")
    rank: Rank = Field(description="part of the model")
    layout_id: HexId = Field(description="id of the layout")
    image_bytes: Bytes = Field(description="size of the image")
    state: Literal["fetching", "ready"] = Field(description="`fetching`: serves verified chunks; `ready`: complete")
    idle_s: Seconds = Field(0, description="seconds since a reader last used it")
    used: bool = Field(False, description="whether an engine on this host has read from it")


class RefusedImage(WireModel):
    """An image that a holder was to keep and does not."""

    model: ModelName = Field(description="name of the model")
    version: WeightsVersion | None = Field(None, description="version of the weights")
    rank_key: Label = Field(description="rank key")
    reason: SanitizedText = Field(description="why it is not kept", examples=["needs 140 GB of 96 GB memory"])


class HolderReport(WireModel):
    """State of a holder, sent completely with each heartbeat."""

    holder_id: Identifier = Field(description="new at each start")
    placement: Placement = Field(description="location of the holder")
    memory_bytes: Bytes = Field(description="memory that its images may use")
    used_bytes: Bytes = Field(0, description="memory that its images use")
    selectors: tuple[ImageSelector, ...] = Field((), max_length=64, description="weights that it keeps in any case")
    follows_host: bool = Field(True, description="whether it also keeps the images of the engines on its host and those announced for it")
    images: tuple[HeldImage, ...] = Field((), max_length=256, description="its images")
    refused: tuple[RefusedImage, ...] = Field((), max_length=256, description="images that it was to keep and does not")


class WantedImage(WireModel):
    """An image that a holder should keep, and why."""

    model: ModelName = Field(description="name of the model")
    version: WeightsVersion = Field(description="version of the weights")
    rank: Rank = Field(description="part of the model")
    layout_id: HexId = Field(description="id of the layout")
    image_bytes: Bytes = Field(description="size of the image")
    cause: Literal["announced", "engine", "selected"] = Field(
        description="`announced`: replicas will start on this host; `engine`: an engine on this host has it; `selected`: the holder selects it"
    )
    reason: SanitizedText = Field("", description="the cause, for display")


class ImageKey(NamedTuple):
    """Identity of an image before its weights are known. Not sent."""

    model: str
    version: str
    """Empty if it is not known yet."""
    rank_key: str
    layout_id: str

    @classmethod
    def of(cls, image: HeldImage | WantedImage) -> ImageKey:
        """Return the key of an image that a holder has, or should have."""
        return cls(image.model, image.version or "", image.rank.key, image.layout_id)


class HolderAck(WireModel):
    """Response to a holder's report."""

    heartbeat_s: float = Field(description="send the next report within this time")
    wanted: tuple[WantedImage, ...] = Field(description="images to keep, most urgent first")


class HolderInfo(WireModel):
    """The planner's record of a holder."""

    report: HolderReport = Field(description="its latest report")
    age_s: float = Field(description="seconds since its latest report")
    wanted: tuple[WantedImage, ...] = Field((), description="images that it should keep, most urgent first")


class HolderPage(WireModel):
    """A page of holders."""

    items: tuple[HolderInfo, ...] = Field(description="sorted by id")
    next: Identifier | None = Field(None, description="pass as `after` to get the next page; null: last page")


class ForkEvent(WireModel):
    """A change of a fork in the event stream."""

    kind: Literal["planned", "progress", "ended"] = Field(description="type of the change")
    fork: ForkInfo = Field(description="the fork after the change")


def source_type(name: str) -> SourceType:
    """Return the kind of a source in `sources`: `KIND:URI` is storage, an instance id is a peer."""
    before = name.partition(":")[0]
    for kind in get_args(StorageType):
        if before == kind:
            return cast(StorageType, kind)
    return "peer"


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
    link_bytes_per_s: BytesPerSecond | None = Field(None, ge=1, description="link speed of a host in one direction; null: the fastest measured by forks, or 10 Gbit/s")
    storage_bytes_per_s: BytesPerSecond | None = Field(None, ge=1, description="storage speed per reader; null: as measured, or 1 GB/s")


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


class Problem(BaseModel):
    """RFC 9457 problem document. The last part of `type` is stable across releases."""

    model_config = ConfigDict(extra="allow")

    type: SanitizedText = Field(description="URI whose last part identifies the problem", examples=["https://rfork.dev/problems/unknown-fork"])
    title: SanitizedText = Field(description="name of the problem, for display")
    status: int = Field(description="the HTTP status")
    detail: SanitizedText = Field(description="what is wrong with this request, and what to do")
    instance: SanitizedText | None = Field(None, description="path of the request")


class ScaleUp(WireModel):
    """An announcement of new replicas, whose forks should share one plan."""

    scaleup_id: Identifier = Field(description="chosen by the caller; a repeated announcement replaces the earlier one")
    model: ModelName = Field(description="model of the replicas")
    version: WeightsVersion | None = Field(None, description="version of the weights; null: unknown")
    replicas: int = Field(ge=0, le=100_000, description="new replicas that have not requested a fork yet; 0: all have arrived")
    expires_in_s: float = Field(900.0, gt=0, le=86_400, description="seconds until replicas that have not arrived are no longer waited for")
    announced_by: Label = Field("", description="name of the announcing party, for display", examples=["deployment/default/llama"])
    hosts: tuple[Label, ...] = Field((), max_length=4096, description="hosts on which replicas will start, where known: their holders fetch the weights before")


class ScaleUpInfo(WireModel):
    """An announced scale-up, and how its replicas will get their weights."""

    scaleup: ScaleUp = Field(description="as announced")
    arrived_count: int = Field(description="replicas of which a rank has requested a fork")
    expires_in_s: float = Field(description="seconds until it expires")
    seeds: int = Field(description="number of complete instances, for the rank that has fewest")
    image_bytes: Bytes = Field(description="size of the images of all ranks of a replica, if known; else 0")
    reason: SanitizedText = Field(description="what the replicas will do: fork from seeds, or read storage once for the group")
