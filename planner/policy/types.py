"""Input and output types of the policy: frozen values without clocks or sockets.

Rates are in bytes per second, times on the scale of `now`, chunk ranges half-open and normalised.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rfork.image.ranges import Range, count
from rfork.schema import InstanceState, StorageType

SLOW_FRACTION: Final = 0.3
"""Fraction of its link speed at which a straggler is assumed to read."""


@dataclass(frozen=True, slots=True)
class HostLocation:
    """Location of an instance."""

    host: str
    rack: str | None = None
    zone: str | None = None
    nvlink: str | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """Storage that an instance could read its image from."""

    kind: StorageType
    uri: str = ""
    origin: str | None = None
    """Identifies the files before any chunk is read; None for a loader."""
    weights_id: str | None = None
    """Known in advance for a snapshot, from its manifest."""


class ChunkShare(NamedTuple):
    """Chunks that a target reads from one source; its own instance_id means its own storage."""

    source_id: str
    chunks: tuple[Range, ...]
    all_or_nothing: bool = False
    """For a target's own storage: a loader, which serves nothing until it has read everything."""


@dataclass(frozen=True, slots=True)
class Source:
    """One rank of an instance, as a source (or as the target itself)."""

    instance_id: str
    address: str
    layout_id: str
    weights_id: str | None
    generation: int
    chunk_count: int
    state: InstanceState
    verified: tuple[Range, ...]
    """Chunks that it can serve."""
    transports: tuple[str, ...]
    """In order of preference."""
    location: HostLocation
    max_readers: int
    expires_at: float
    """When it is forgotten."""
    provisional_id: str | None = None
    """Origin of its chunks, if they were not final when it received the first one."""
    storage: tuple[Storage, ...] = ()
    """Storage that it could read, in order of preference."""
    egress_share: float = 1.0
    """Relative share of the readers; the default is 1."""
    egress_rate: float | None = None
    """Maximum egress bandwidth, if it reports one."""
    ingress_rate: float | None = None
    """Fastest observed read rate, if any."""
    read_rate: float | None = None
    """Read rate over the network by its fork's last report since its plan, if any."""
    active_rate: float | None = None
    """The same while chunks were being read: time in which it waited for its sources does not count."""
    source_rates: Mapping[str, float] = field(default_factory=dict)
    """The same by source."""
    slow: bool = False
    """It falls behind its own sources: no target should wait for it."""
    quarantined_until: float = 0.0
    quarantine: str = ""
    """Reason of the quarantine."""
    holder: str | None = None
    """Holder that keeps its image without an engine; None for an engine."""

    watermark: int = field(init=False, compare=False)
    """Number of chunks that it can serve."""
    complete: bool = field(init=False, compare=False)
    """True if it has every chunk of final weights, so that it waits for no source."""

    def __post_init__(self) -> None:
        # Each source is compared with others several times in a plan.
        watermark = count(self.verified)
        object.__setattr__(self, "watermark", watermark)
        object.__setattr__(self, "complete", self.weights_id is not None and watermark == self.chunk_count)

    @property
    def background(self) -> bool:
        """True for a holder's image: no engine waits for its fork, unless one reads from it."""
        return self.holder is not None

    @property
    def is_slow_relay(self) -> bool:
        """True if it delays its readers: a complete source waits for no other."""
        return self.slow and not self.complete


class ContentCount(NamedTuple):
    """Number of instances with one content that can be read from; the greater value is preferred."""

    seeds: int = 0
    """Those with all chunks."""
    instances: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class GroupView:
    """One rank of one model: all instances that have it or are receiving it.

    The mappings may be live views of the planner's index: the policy only reads them, and decides synchronously.
    """

    model: str
    rank_key: str
    sources: Mapping[str, Source]
    """By instance_id."""
    readers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Readers of each instance, by instance_id: fork ids, with the fraction of a target's link at full speed
    that each fork takes from this source.
    """
    same_host_readers: Mapping[str, AbstractSet[str]] = field(default_factory=dict)
    """Readers of each instance that stay within its host and do not use its network link, by instance_id."""
    shares: Mapping[str, tuple[ChunkShare, ...]] = field(default_factory=dict)
    """Current reads of each target, by its instance_id."""
    candidates: tuple[str, ...] | None = None
    """Instances worth considering for these demands, if the group is large; None: all."""
    background_forks: Mapping[str, str] = field(default_factory=dict)
    """Targets of holders' forks, by fork_id (see `planner.policy.background`)."""
    shared_hosts: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Members on each host that has a holder's image: they share its network link."""
    receiving_hosts: Container[str] = frozenset()
    """Hosts on which forks that engines wait for read over the network, in this group or in others."""
    sending_hosts: Container[str] = frozenset()
    """Hosts from which they read over the network."""
    loader_only: bool = False
    """True if a loader already ran here for the group and its instance served nothing: each target then runs
    its own.
    """
    content_counts: Mapping[tuple[str | None, str | None], ContentCount] | None = None
    """Instances with the demands' layout, by (weights_id, provisional_id), if `candidates` are not all."""
    other_layouts: Mapping[str, int] = field(default_factory=dict)
    """Number of instances with another layout than the demands', by layout_id; at least one of them is among
    the candidates.
    """
    other_ranks: tuple[str, ...] = ()
    """Keys of the model's ranks that instances have, for the reason of a plan without routes."""
    version: str = ""
    """The version of the weights, for reasons."""
    other_versions: Mapping[str, int] = field(default_factory=dict)
    """Number of instances that serve another version of this model and rank, by version, for reasons."""


@dataclass(frozen=True, slots=True)
class ForkDemand:
    """A fork that needs a plan."""

    fork_id: str
    target: Source
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Reasons by instance_id: sources that failed this fork; its own id means its own storage."""
    current_shares: tuple[ChunkShare, ...] = ()
    """Current reads, kept while they are good."""
    is_elected_reader: bool = False
    """True if an earlier plan elected it to read its own storage: other targets may wait for it."""


class RouteAssignment(NamedTuple):
    """Chunks to read from one source, over the transports that both support, in the target's order of
    preference.
    """

    source_id: str
    chunks: tuple[Range, ...]
    transports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """Reads of one target from peers and from its own storage; if there are none, `reason` explains why."""

    weights_id: str | None
    assignments: tuple[RouteAssignment, ...]
    reason: str
    provisional_id: str | None = None
    storage: tuple[tuple[Storage, tuple[Range, ...]], ...] = ()
    """Storage that it is elected to read, for itself and for every downstream target."""
    no_free_slot: bool = False
    """True if retrying soon may yield (more) routes: a source has no free slot, waits for its own source, or
    may be elected to read storage.
    """
    is_paused: bool = False
    """True if a background fork must not read now: it waits until engines' forks have ended."""
    mismatched_source: str | None = None
    """instance_id to compare layouts with, if all instances of the model have another layout."""

    @property
    def shares(self) -> tuple[ChunkShare, ...]:
        """Chunks that the target reads from its peers; `storage` is separate."""
        return tuple(ChunkShare(each.source_id, each.chunks) for each in self.assignments)


def distance(left: HostLocation, right: HostLocation) -> int:
    """Return 0 on one host or in one NVLink domain, 1 in one rack, 2 in one zone, 3 beyond or unknown."""
    if left.host == right.host or (left.nvlink is not None and left.nvlink == right.nvlink):
        return 0
    same_zone = left.zone == right.zone
    if left.rack is not None and left.rack == right.rack and same_zone:
        return 1
    return 2 if left.zone is not None and same_zone else 3


def link_fraction(source: Source, link: float) -> float:
    """Return the fraction (0 to 1) of a link of this many bytes per second (0: unknown) that a source can
    serve.
    """
    return min(1.0, source.egress_rate / link) if source.egress_rate and link else 1.0
