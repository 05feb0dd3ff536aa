"""The values that the policy decides over: frozen, without clocks or sockets.

Rates are bytes a second, times are in the seconds of `now`, chunk ranges half-open and normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from rfork.image.ranges import Range, count
from rfork.schema.types import InstanceState, StorageKind

SLOW_FRACTION: Final = 0.3
"""Part of a link's speed that a target is taken to read at which falls behind."""


@dataclass(frozen=True, slots=True)
class HostLocation:
    """Where an instance runs."""

    host: str
    rack: str | None = None
    zone: str | None = None
    nvlink: str | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """Something an instance could read its image from by itself."""

    kind: StorageKind
    uri: str = ""
    origin: str | None = None
    """What tells these files from others before any chunk is read; none for a loader."""
    weights_id: str | None = None
    """Of a snapshot, whose manifest is known beforehand."""


@dataclass(frozen=True, slots=True)
class ChunkShare:
    """Chunks that a target reads from one source; its own instance_id stands for its own storage."""

    source_id: str
    chunks: tuple[Range, ...]
    all_or_nothing: bool = False
    """Of a target's own storage: a loader, which gives nothing before it has read everything."""


@dataclass(frozen=True)
class Source:
    """One rank of an instance, as somebody to read from (or as the target itself)."""

    instance_id: str
    address: str
    layout_id: str
    weights_id: str | None
    generation: int
    chunk_count: int
    state: InstanceState
    verified: tuple[Range, ...]
    """Chunks it can give."""
    transports: tuple[str, ...]
    """Best first."""
    location: HostLocation
    max_readers: int
    expires_at: float
    """When it is forgotten."""
    provisional_id: str | None = None
    """Origin of its chunks where these were not sealed yet when it got the first."""
    storage: tuple[Storage, ...] = ()
    """What it could read by itself, best first."""
    egress_share: float = 1.0
    """Share of the readers it wants, beside others that say 1."""
    egress_rate: float | None = None
    """What it gives at most, if it says so."""
    ingress_rate: float | None = None
    """The fastest it has been seen to read, if it has."""
    slow: bool = False
    """It has been seen to fall behind its own sources: nobody should wait for it."""
    quarantined_until: float = 0.0
    quarantine: str = ""
    """Why it is quarantined."""

    @cached_property
    def watermark(self) -> int:
        """How many chunks it can give."""
        return count(self.verified)

    @cached_property
    def complete(self) -> bool:
        """Whether it holds every chunk of weights that it can name: it waits for nobody."""
        return self.weights_id is not None and self.watermark == self.chunk_count


@dataclass(frozen=True, order=True, slots=True)
class HolderCount:
    """How many hold one content and may be read from; the greater is preferred."""

    seeds: int = 0
    """Those that hold all of it."""
    instances: int = 0
    generation: int = 0


@dataclass(frozen=True)
class GroupView:
    """What is known of all that hold, or are getting, one rank of one model.

    The mappings may be views of a registry's own: the policy only reads them, and decides at once.
    """

    model: str
    rank_key: str
    sources: Mapping[str, Source]
    """By instance_id."""
    readers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By instance_id: the forks that read from it, and what part of all that each reads it reads there: of a
    target's link at full speed, that much is its."""
    same_host_readers: Mapping[str, AbstractSet[str]] = field(default_factory=dict)
    """By instance_id: those readers that stay within its host, and take nothing of its network link."""
    shares: Mapping[str, tuple[ChunkShare, ...]] = field(default_factory=dict)
    """By the target's instance_id: what it reads now, and from whom."""
    candidates: tuple[str, ...] | None = None
    """The instances worth a look for these demands, where the group is large; none: all of them."""
    loader_only: bool = False
    """Whether a loader was run here for all and its instance gave nothing: each then runs its own."""
    holders: Mapping[tuple[str | None, str | None], HolderCount] | None = None
    """Who holds what of the demands' layout, by (weights_id, draft), where `candidates` are not all."""
    other_layouts: Mapping[str, int] = field(default_factory=dict)
    """How many instances hold another layout than the demands', by layout_id; where there are any, one of
    them is among the candidates."""
    other_ranks: tuple[str, ...] = ()
    """Keys of the model's ranks that somebody does hold, for the reason of a plan without routes."""
    version: str = ""
    """The version of the weights, for reasons."""
    other_versions: Mapping[str, int] = field(default_factory=dict)
    """How many instances serve another version of this model and rank, by version, for reasons."""


@dataclass(frozen=True)
class ForkDemand:
    """A fork that needs a plan."""

    fork_id: str
    target: Source
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Instances that failed this fork, and how; its own id stands for its own storage."""
    current_shares: tuple[ChunkShare, ...] = ()
    """What it reads now, to be kept while that is good."""
    is_elected_reader: bool = False
    """Whether it was to read its own storage by any plan before: others may wait for it to."""


@dataclass(frozen=True)
class RouteAssignment:
    """Chunks to read from one source, over the transports that both offer (the target's best first)."""

    source_id: str
    chunks: tuple[Range, ...]
    transports: tuple[str, ...]


@dataclass(frozen=True)
class PlanDecision:
    """What one target reads from peers and from its own storage; where nothing, `reason` says why."""

    weights_id: str | None
    assignments: tuple[RouteAssignment, ...]
    reason: str
    provisional_id: str | None = None
    storage: tuple[tuple[Storage, tuple[Range, ...]], ...] = ()
    """What it is elected to read by itself, for itself and for all that wait behind it."""
    no_free_slot: bool = False
    """Whether asking again soon may give (more) routes: a source has no free slot now, or waits for its own,
    or may come to read storage."""
    mismatched_source: str | None = None
    """Whom to compare with (instance_id), where all that hold the model hold another layout."""

    @property
    def shares(self) -> tuple[ChunkShare, ...]:
        """What the target reads from peers (its storage is told by `storage`)."""
        return tuple(ChunkShare(each.source_id, each.chunks) for each in self.assignments)


def distance(left: HostLocation, right: HostLocation) -> int:
    """0 on one host or in one NVLink domain, 1 in one rack, 2 in one zone, 3 beyond or not known."""
    if left.host == right.host or (left.nvlink is not None and left.nvlink == right.nvlink):
        return 0
    same_zone = left.zone == right.zone
    if left.rack is not None and left.rack == right.rack and same_zone:
        return 1
    return 2 if left.zone is not None and same_zone else 3


def link_fraction(source: Source, link: float) -> float:
    """What part of a link of so many bytes a second (0: nobody knows) a source gives at most: 0 to 1."""
    return min(1.0, source.egress_rate / link) if source.egress_rate and link else 1.0
