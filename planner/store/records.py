"""What the planner keeps of an instance, a fork and a scale-up; each change makes a new record.

Times are seconds on the store's clock, which all replicas share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from planner.accusations import Accusation, active_accusations
from planner.policy_types import HostLocation, Source, Storage
from rfork import schema
from rfork.image.ranges import Range, normalise
from rfork.schema import (
    ForkInfo,
    ForkProgress,
    ForkResult,
    InstanceInfo,
    InstanceReport,
    Rank,
    ScaleUp,
    StorageAssignment,
)
from rfork.schema.types import ForkState


class GroupKey(NamedTuple):
    """What instances share weights by: one rank of one version of a model."""

    model: str
    version: str
    """Empty for targets whose version is not settled yet."""
    rank_key: str


@dataclass(frozen=True)
class InstanceRecord:
    """An instance as it last reported itself, and what others said of it."""

    report: InstanceReport
    seen_at: float
    ttl_s: float
    drained: bool = False
    """Drained through the planner; its own reports do not undo that."""
    quarantined_until: float = 0.0
    quarantine: str = ""
    reported_missing: bool = False
    """A reader found it gone, and nothing has been heard of it since."""
    ingress_rate: float | None = None
    """The fastest that any of its forks read, in bytes a second."""
    slow_since: float | None = None
    """Since when its fork falls behind the sources it reads from, if it does."""
    since: float = 0.0
    """When it was first heard of."""
    asked_for_plan: bool = False
    """Whether it has asked for its (first) fork."""
    resolved_version: str = ""
    """The version that the planner chose for an instance that reports none."""
    owner: str = ""
    """Digest of the secret that later changes must show; empty: any caller may change it."""
    accusations: tuple[Accusation, ...] = ()
    """What readers say that it did wrong, the oldest first."""
    contradiction_count: int = 0
    """How many of its own accusations other readers contradicted."""

    @property
    def version(self) -> str:
        """The version of its weights, or of those it is getting; empty while that is not settled."""
        return self.report.version or self.resolved_version

    @property
    def group(self) -> GroupKey:
        """What it may share weights with."""
        return GroupKey(self.report.model, self.version, self.report.rank.key)

    @property
    def expires_at(self) -> float:
        """When it is forgotten."""
        return self.seen_at + self.ttl_s

    @cached_property
    def source(self) -> Source:
        """The instance as the policy sees it."""
        report, placement = self.report, self.report.placement
        return Source(
            instance_id=report.instance_id,
            address=report.address,
            layout_id=report.layout_id,
            weights_id=report.weights_id,
            generation=report.generation,
            chunk_count=report.chunk_count,
            state="draining" if self.drained else report.state,
            verified=normalise(report.verified),
            transports=report.transports,
            location=HostLocation(placement.host, placement.rack, placement.zone, placement.nvlink),
            max_readers=report.max_readers,
            expires_at=self.expires_at,
            provisional_id=report.provisional_id,
            storage=tuple(Storage(offer.kind, offer.uri, offer.origin, offer.weights_id) for offer in report.storage),
            egress_share=report.egress_share,
            egress_rate=report.egress_rate,
            ingress_rate=self.ingress_rate,
            slow=self.slow_since is not None,
            quarantined_until=self.quarantined_until,
            quarantine=self.quarantine,
        )

    def view(self, now: float) -> InstanceInfo:
        """The instance as it is listed."""
        report, state = self.report, self.source.state
        return InstanceInfo(
            report=report if report.state == state else report.model_copy(update={"state": state}),
            version=self.version or None,
            age_s=max(0.0, now - self.seen_at),
            quarantined=self.quarantine if now < self.quarantined_until else None,
            accused=next((each.reason for each in active_accusations(self.accusations, report.generation, now)), None),
        )


@dataclass(frozen=True)
class SourceFaultRecord:
    """Why a fork is not sent to an instance again, for a while."""

    reason: str
    until: float
    generation: int | None = None
    """Set where only this generation of the source's weights is to be avoided."""
    is_source_fault: bool = False
    """The fork says that the source did wrong, not only that it failed."""

    def is_active(self, now: float, generation: int) -> bool:
        """Whether a source with this generation is still to be avoided."""
        return now < self.until and self.generation in (None, generation)


@dataclass(frozen=True)
class RouteRecord:
    """One route of a fork's plan: chunks of one generation of one peer."""

    source_id: str
    chunks: tuple[Range, ...]
    transports: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class ForkRecord:
    """One fork, from its first request to some time after its end."""

    fork_id: str
    instance_id: str
    model: str
    rank: Rank
    chunk_count: int
    image_bytes: int
    requested_at: float
    planned_at: float
    seen_at: float
    reads: tuple[RouteRecord, ...] = ()
    storage: tuple[StorageAssignment, ...] = ()
    """What the target is elected to read by itself."""
    weights_id: str | None = None
    provisional_id: str | None = None
    version: str = ""
    """Of the weights it gets; empty while that is not settled."""
    reason: str = ""
    progress: ForkProgress | None = None
    finish: ForkResult | None = None
    abandoned: bool = False
    """Given up by the planner, not ended by the target: it may ask again."""
    faults_by_source: Mapping[str, SourceFaultRecord] = field(default_factory=dict)
    sources_used: frozenset[str] = frozenset()
    """Every instance that any of its plans named; its own id stands for its own storage."""
    source_rate_limits: Mapping[str, int] = field(default_factory=dict)
    """Bytes a second that sources of its plan held all their readers to, where they did."""
    owner: str = ""
    """As its instance's when it was planned."""

    @property
    def group(self) -> GroupKey:
        """What it may share weights with."""
        return GroupKey(self.model, self.version, self.rank.key)

    @property
    def live(self) -> bool:
        """Whether it is under way."""
        return self.finish is None

    @property
    def state(self) -> ForkState:
        """The fork's state, in the word that is listed."""
        if self.finish is not None:
            return "finished" if self.finish.outcome in ("forked", "fallback") else "failed"
        return "running" if self.reads or self.storage else "planning"

    def view(self, now: float) -> ForkInfo:
        """The fork as it is listed."""
        shares = [schema.ChunkAssignment(source_id=read.source_id, chunks=read.chunks) for read in self.reads]
        shares += [schema.ChunkAssignment(source_id=self.instance_id, chunks=read.chunks) for read in self.storage]
        return ForkInfo(
            fork_id=self.fork_id,
            instance_id=self.instance_id,
            model=self.model,
            version=self.version or None,
            rank=self.rank,
            state=self.state,
            plan=tuple(shares),
            reason=self.reason,
            progress=self.progress,
            finish=self.finish,
            source_rate_limits=dict(self.source_rate_limits),
            age_s=max(0.0, now - self.requested_at),
            chunk_count=self.chunk_count,
            image_bytes=self.image_bytes,
        )


@dataclass(frozen=True)
class ScaleUpRecord:
    """A scale-up that was announced; who has come since stands in the records of instances."""

    scaleup: ScaleUp
    """As it was last announced."""
    first_at: float
    """When it was first announced: instances that were known before are not among those expected."""
    expires_at: float
    before: int = 0
    """Replicas that had come when it was last announced: those it tells of come on top of them."""

    @property
    def expected(self) -> int:
        """Replicas that come in all, since `first_at`."""
        return self.before + self.scaleup.replicas
