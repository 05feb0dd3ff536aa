"""What targets tell of their forks, and how the planner lists them."""

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
    SourceKind,
    SourceRates,
    SourceTransports,
    StorageKind,
    WeightsVersion,
)


class ForkProgress(WireModel):
    """What a target tells the planner about once a second."""

    verified: Chunks = Field(description="chunks that arrived and are right")
    bytes_read: Bytes = Field(description="bytes of the chunks that arrived so far, right or wrong")
    bytes_per_s: BytesPerSecond = Field(description="bytes a second now: in its last second; before one has passed, the mean so far")
    sources: SourceBytes = Field(default_factory=dict, description="verified bytes by source: an instance, or `KIND:URI` for storage")
    source_bytes_per_s: SourceRates = Field(default_factory=dict, description="verified bytes a second now, by source, over the same second as `bytes_per_s`; of those that give something the 64 fastest")
    link_bytes_per_s: BytesPerSecond | None = Field(None, description="bytes a second in its fastest second, which stands for its link; none: not known yet")
    transports: SourceTransports = Field(default_factory=dict, description="over which each source is read last; storage has none")
    phases: Phases = Field(default_factory=dict, description="seconds in each phase so far, in the order in which they began: the last one goes on")


class ProgressAck(WireModel):
    """Renewed leases, by source instance."""

    leases: dict[Identifier, Lease] = Field(default_factory=dict, description="by source: each takes the place of the one before")
    replan_suggested: SanitizedText | None = Field(None, description="why the planner has a better plan by now: ask for it; none: go on")


class ForkResult(WireModel):
    """How a fork ended."""

    outcome: Outcome = Field(description="forked: by the plan, from peers or from storage that it was elected to read; fallback: loaded by itself after all; failed: no weights; interrupted: told to end before")
    seconds: Seconds = Field(description="of the whole fork as its target saw it, waits included")
    bytes_read: Bytes = Field(description="bytes of the chunks that arrived, right or wrong")
    sources: SourceBytes = Field(default_factory=dict, description="verified bytes by source")
    fallback: SanitizedText | None = Field(None, description="what was loaded instead, if a fallback was")
    reasons: Reasons = Field((), description="each failure on the way, one line; the last 64 count")
    efficiency: float | None = Field(None, ge=0, le=1e9, description="(S/B)/T: image bytes over the transfer's seconds, against the fastest second's rate")
    bytes_repeated: Bytes = Field(0, description="bytes that had to be read again")
    replans: int = Field(0, ge=0, le=1 << 20, description="how often it was planned again")
    link_bytes_per_s: BytesPerSecond | None = Field(None, description="bytes a second in its fastest second, which stands for its link; none: not known")
    source_bytes_per_s: SourceRates = Field(default_factory=dict, description="verified bytes a second by source, each in its own fastest second; of a fork shorter than that none, of many sources the 64 fastest")
    transports: SourceTransports = Field(default_factory=dict, description="over which each source was read last; storage has none")
    phases: Phases = Field(default_factory=dict, description="seconds in each phase, in the order in which they began")


class ForkInfo(WireModel):
    """A fork as the planner lists it."""

    fork_id: Identifier = Field(description="chosen by its target")
    instance_id: Identifier = Field(description="the target")
    model: ModelName = Field(description="of the target")
    version: WeightsVersion | None = Field(None, description="of the weights it gets; none: not settled yet")
    rank: Rank = Field(description="of the target")
    state: ForkState = Field(description="planning: it has no plan yet; running: it has one; finished: its target has weights, forked or by a fallback; failed: it has none, or was lost")
    plan: tuple[ChunkAssignment, ...] = Field((), description="what it is to read, by source, as last planned")
    reason: SanitizedText = Field("", description="how the sources were chosen, or why there are none")
    progress: ForkProgress | None = Field(None, description="what it told last; none: nothing yet")
    finish: ForkResult | None = Field(None, description="how it ended; none: it has not, or its target was lost")
    source_rate_limits: dict[Identifier, int] = Field(default_factory=dict, description="bytes a second that a source it reads (or read last) from held all its readers to, where it did")
    age_s: float = Field(description="seconds since it first asked")
    chunk_count: ChunkCount = Field(description="of the target's image")
    image_bytes: Bytes = Field(description="of the target's image")


class ForkPage(WireModel):
    """Some of the forks."""

    items: tuple[ForkInfo, ...] = Field(description="in the order of their ids")
    next: Identifier | None = Field(None, description="pass as `after` for the next page; none: this is the last")


class ForkEvent(WireModel):
    """One change of a fork, as the event stream tells it."""

    kind: Literal["planned", "progress", "ended"] = Field(description="what happened")
    fork: ForkInfo = Field(description="the fork after it")


def source_kind(name: str) -> SourceKind:
    """The kind of a source by its name in `sources`: `KIND:URI` for storage, an instance_id for a peer."""
    before = name.partition(":")[0]
    for kind in get_args(StorageKind):
        if before == kind:
            return cast(StorageKind, kind)
    return "peer"
