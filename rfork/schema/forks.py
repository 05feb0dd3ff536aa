"""Wire models of forks: reports of targets, and the planner's records."""

from __future__ import annotations

from typing import Literal, cast, get_args

from pydantic import Field

from rfork.schema.base import WireModel
from rfork.schema.instances import Rank
from rfork.schema.plans import ChunkAssignment, Lease
from rfork.schema.types import (
    Bytes,
    BytesPerSecond,
    ChunkCount,
    Chunks,
    ForkState,
    Identifier,
    ModelName,
    Outcome,
    Phases,
    Reasons,
    SanitizedText,
    Seconds,
    SourceBytes,
    SourceRates,
    SourceTransports,
    SourceType,
    StorageType,
    WeightsVersion,
)


class ForkProgress(WireModel):
    """Progress of a fork, reported by the target about once a second."""

    verified: Chunks = Field(description="verified chunks")
    bytes_read: Bytes = Field(description="bytes of all chunks received so far, valid or not")
    bytes_per_s: BytesPerSecond = Field(description="current rate in bytes per second: over the last second, at first the mean so far")
    sources: SourceBytes = Field(default_factory=dict, description="verified bytes by source: instance id, or `KIND:URI` of storage")
    source_bytes_per_s: SourceRates = Field(default_factory=dict, description="current rate of each source in verified bytes per second; only the 64 fastest active sources")
    link_bytes_per_s: BytesPerSecond | None = Field(None, description="peak rate in bytes per second, the estimate of the link's speed; null: unknown")
    transports: SourceTransports = Field(default_factory=dict, description="last transport used for each source; storage has none")
    phases: Phases = Field(default_factory=dict, description="seconds in each phase so far, in order; the last phase is still running")


class ProgressAck(WireModel):
    """Response to a progress report: renewed leases."""

    leases: dict[Identifier, Lease] = Field(default_factory=dict, description="renewed lease by source; replaces the previous one")
    replan_suggested: SanitizedText | None = Field(None, description="why the planner has a better plan, so that the target should request one; null: continue")


class ForkResult(WireModel):
    """Final report of a fork."""

    outcome: Outcome = Field(description="`forked`: loaded by the plan, from peers or from storage that it was elected to read; `fallback`: loaded without peers; `failed`: not loaded; `interrupted`: stopped before the end")
    seconds: Seconds = Field(description="duration of the entire fork, including waits")
    bytes_read: Bytes = Field(description="bytes of all chunks received, valid or not")
    sources: SourceBytes = Field(default_factory=dict, description="verified bytes by source")
    fallback: SanitizedText | None = Field(None, description="fallback that loaded the weights; null: none")
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


class ForkPage(WireModel):
    """A page of forks."""

    items: tuple[ForkInfo, ...] = Field(description="sorted by id")
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
