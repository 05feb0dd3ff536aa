"""Immutable records of instances, forks, scale-ups and holders; each change makes a new record.

Times are in seconds on the store's clock, which all replicas share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from planner.policy.types import HostLocation, Source, Storage
from rfork import schema
from rfork.image.ranges import Range, normalise
from rfork.schema import (
    ForkInfo,
    ForkProgress,
    ForkResult,
    ForkState,
    HolderInfo,
    HolderReport,
    ImageKey,
    InstanceInfo,
    InstanceReport,
    Outcome,
    Rank,
    ScaleUp,
    StorageAssignment,
    StorageCandidate,
    WantedImage,
)


class GroupKey(NamedTuple):
    """Instances with equal keys share weights: one rank of one version of a model."""

    model: str
    version: str
    """Empty for targets whose version is not resolved yet."""
    rank_key: str


@lru_cache(1024)
def _shared_key(model: str, version: str, rank_key: str) -> GroupKey:
    """Return the same key for all records of a group: each keeps it, because a plan needs it a dozen times."""
    return GroupKey(model, version, rank_key)


@dataclass(frozen=True, slots=True)
class Witness:
    """A reader that reports faults, with the attributes that distinguish it from other readers."""

    instance_id: str
    host: str
    address: str = ""
    """Network address that it calls from; empty if unknown."""

    @property
    def key(self) -> str:
        """A key that is equal for readers that cannot be distinguished."""
        return f"{self.host}|{self.address}"

    def is_apart_from(self, other: Witness) -> bool:
        """Return True if the two readers are on different hosts."""
        unknown = not self.address or not other.address
        return self.host != other.host and (unknown or self.address != other.address)


@dataclass(frozen=True, slots=True)
class Accusation:
    """A reader's statement that a source is at fault."""

    accuser: Witness
    fork_id: str
    reason: str
    at: float
    until: float
    """Time from which it no longer counts."""
    generation: int
    """Generation of the source's weights that were read."""
    credibility: float = 1.0
    contradicted_by: tuple[str, ...] = ()
    """Keys of witnesses that have since read verified bytes from the source."""

    @property
    def error(self) -> str:
        """Name of the error, with which the reason begins."""
        return self.reason.partition(":")[0]


def active_accusations(accusations: Iterable[Accusation], generation: int, now: float) -> tuple[Accusation, ...]:
    """Return the accusations that still count: not expired, and against the source's current generation."""
    return tuple(each for each in accusations if each.generation == generation and now < each.until)


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """An instance's last report, and what the planner and other instances know about it."""

    report: InstanceReport
    seen_at: float
    ttl_s: float
    drained: bool = False
    """Drained through the planner; its own reports do not reset that."""
    quarantined_until: float = 0.0
    quarantine: str = ""
    reported_missing: bool = False
    """A reader could not reach it, and it has not reported since."""
    ingress_rate: float | None = None
    """Fastest observed read rate of its forks, in bytes per second."""
    read_rate: float | None = None
    """Read rate over the network by its fork's last report since its plan, in bytes per second."""
    active_rate: float | None = None
    """The same while chunks were being read; see `ForkProgress.active_bytes_per_s`."""
    source_rates: Mapping[str, float] = field(default_factory=dict)
    """The same by source, by instance_id."""
    slow_since: float | None = None
    """Time since which its fork falls behind its sources, if it does."""
    since: float = 0.0
    """Time of the first report."""
    plan_requested: bool = False
    """True if it has requested a plan."""
    resolved_version: str = ""
    """Version that the planner chose for an instance that reports none."""
    owner: str = ""
    """Digest of the secret that later changes must match; empty: any caller may change it."""
    accusations: tuple[Accusation, ...] = ()
    """Accusations by readers, oldest first."""
    contradiction_count: int = 0
    """Number of its own accusations that other readers contradicted."""
    group: GroupKey = field(init=False, compare=False)
    """Group that it may share weights with."""
    source: Source = field(init=False, compare=False)
    """Instance as input of the policy."""

    def __post_init__(self) -> None:
        # The index of every store needs both, and a plan reads them often.
        object.__setattr__(self, "group", _shared_key(self.report.model, self.version, self.report.rank.key))
        object.__setattr__(self, "source", self._source())

    @property
    def version(self) -> str:
        """Version of its weights, or of those it is receiving; empty until resolved."""
        return self.report.version or self.resolved_version

    @property
    def expires_at(self) -> float:
        """Time at which it is forgotten."""
        return self.seen_at + self.ttl_s

    def view(self, now: float) -> InstanceInfo:
        """Return the instance as listed by the API."""
        report, state = self.report, self.source.state
        return InstanceInfo(
            report=report if report.state == state else report.model_copy(update={"state": state}),
            version=self.version or None,
            age_s=max(0.0, now - self.seen_at),
            quarantined=self.quarantine if now < self.quarantined_until else None,
            accused=next((each.reason for each in active_accusations(self.accusations, report.generation, now)), None),
        )

    def _source(self) -> Source:
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
            storage=_policy_storage(report.storage),
            egress_share=report.egress_share,
            egress_rate=report.egress_rate,
            ingress_rate=self.ingress_rate,
            read_rate=self.read_rate,
            active_rate=self.active_rate,
            source_rates=self.source_rates,
            slow=self.slow_since is not None,
            quarantined_until=self.quarantined_until,
            quarantine=self.quarantine,
            holder=report.holder,
        )


@lru_cache(1024)
def _policy_storage(offers: tuple[StorageCandidate, ...]) -> tuple[Storage, ...]:
    """Return the storage that an instance offers as input of the policy: the ranks of a model offer the same."""
    return tuple(Storage(offer.kind, offer.uri, offer.origin, offer.weights_id) for offer in offers)


@dataclass(frozen=True, slots=True)
class SourceFaultRecord:
    """Reason why a fork avoids an instance for some time."""

    reason: str
    until: float
    generation: int | None = None
    """Set if only this generation of the source's weights is to be avoided."""
    is_source_fault: bool = False
    """True if the fork blames the source itself, and not only reports that it failed."""

    def is_active(self, now: float, generation: int) -> bool:
        """Return True if a source with this generation is still to be avoided."""
        return now < self.until and self.generation in (None, generation)


@dataclass(frozen=True, slots=True)
class RouteRecord:
    """One route of a fork's plan: chunks of one generation of one peer."""

    source_id: str
    chunks: tuple[Range, ...]
    transports: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class ForkRecord:
    """One fork, from its first request until some time after it ends."""

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
    """Storage that the target is elected to read."""
    weights_id: str | None = None
    provisional_id: str | None = None
    version: str = ""
    """Version of the weights it gets; empty until resolved."""
    reason: str = ""
    progress: ForkProgress | None = None
    finish: ForkResult | None = None
    abandoned: bool = False
    """Ended by the planner, not by the target: it may request a plan again."""
    faults_by_source: Mapping[str, SourceFaultRecord] = field(default_factory=dict)
    sources_used: frozenset[str] = frozenset()
    """Every instance named in any of its plans; its own id means its own storage."""
    source_rate_limits: Mapping[str, int] = field(default_factory=dict)
    """Egress limits of its sources in bytes per second, by instance_id."""
    owner: str = ""
    """Owner of its instance when it was planned."""
    holder: str | None = None
    """Holder that fetches the image without an engine; None for an engine."""
    group: GroupKey = field(init=False, compare=False)
    """Group that it may share weights with."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", _shared_key(self.model, self.version, self.rank.key))

    @property
    def live(self) -> bool:
        """True if it is running."""
        return self.finish is None

    @property
    def state(self) -> ForkState:
        """State of the fork as listed by the API."""
        if self.finish is not None:
            return "finished" if self.finish.outcome in ("forked", "fallback") else "failed"
        return "running" if self.reads or self.storage else "planning"

    def view(self, now: float) -> ForkInfo:
        """Return the fork as listed by the API."""
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
            holder=self.holder,
        )


@dataclass(frozen=True)
class ScaleUpRecord:
    """An announced scale-up; its arrivals are recorded in the instances' records."""

    scaleup: ScaleUp
    """Last announcement."""
    first_at: float
    """Time of the first announcement: instances known before are not expected."""
    expires_at: float
    before: int = 0
    """Replicas that had arrived at the last announcement, which counts only further ones."""

    @property
    def expected(self) -> int:
        """Total number of replicas expected since `first_at`."""
        return self.before + self.scaleup.replicas


@dataclass(frozen=True)
class HolderRecord:
    """A holder's last report. Its images are instances with records of their own."""

    report: HolderReport
    seen_at: float
    ttl_s: float
    owner: str = ""
    """Digest of the secret that later changes must match; empty: any caller may change it."""
    prefetched: tuple[ImageKey, ...] = ()
    """Images that it fetched because they were announced, and that no engine on its host has used yet."""

    @property
    def holder_id(self) -> str:
        """Id of the holder."""
        return self.report.holder_id

    @property
    def expires_at(self) -> float:
        """Time at which it is forgotten."""
        return self.seen_at + self.ttl_s

    def view(self, now: float, wanted: tuple[WantedImage, ...]) -> HolderInfo:
        """Return the holder as listed by the API."""
        return HolderInfo(report=self.report, age_s=max(0.0, now - self.seen_at), wanted=wanted)


@dataclass(frozen=True, slots=True)
class StoreChange:
    """Records to write, and ids to remove, atomically."""

    instances: tuple[InstanceRecord, ...] = ()
    forks: tuple[ForkRecord, ...] = ()
    removed: tuple[str, ...] = ()
    """Ids of instances to remove."""
    scaleups: tuple[ScaleUpRecord, ...] = ()
    withdrawn: tuple[str, ...] = ()
    """Ids of scale-ups to remove."""
    holders: tuple[HolderRecord, ...] = ()
    removed_holders: tuple[str, ...] = ()
    """Ids of holders to remove."""
    group: GroupKey | None = None
    """If set, the change is applied only if the forks of this group have not changed since `version`."""
    version: int = 0


def build_fork_result(fork: ForkRecord, outcome: Outcome, reason: str, now: float) -> ForkResult:
    """Return the result of a fork that the planner ends on behalf of its target."""
    progress = fork.progress
    return ForkResult(
        outcome=outcome,
        seconds=max(0.0, now - fork.requested_at),
        bytes_read=progress.bytes_read if progress else 0,
        sources=progress.sources if progress else {},
        transports=progress.transports if progress else {},
        phases=progress.phases if progress else {},
        link_bytes_per_s=progress.link_bytes_per_s if progress else None,
        reasons=(reason,),
    )
