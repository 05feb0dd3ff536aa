"""The values that the policy decides over: frozen, without clocks or sockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rfork.image.ranges import Range, count
from rfork.wire import InstanceState


@dataclass(frozen=True)
class Place:
    """Where an instance runs."""

    host: str
    rack: str | None = None
    zone: str | None = None


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
    """Chunks it can give, normalised."""
    transports: tuple[str, ...]
    """Best first."""
    place: Place
    max_readers: int
    expires_at: float
    """When it is forgotten, in the seconds of `now`."""
    quarantined_until: float = 0.0
    quarantine: str = ""
    """Why it is quarantined."""

    @property
    def watermark(self) -> int:
        """How many chunks it can give."""
        return count(self.verified)

    @property
    def complete(self) -> bool:
        """Whether it holds every chunk of weights that it can name: it waits for nobody."""
        return self.weights_id is not None and self.watermark == self.chunk_count


@dataclass(frozen=True)
class Group:
    """What is known of all that hold, or are getting, one rank of one model."""

    model: str
    rank_key: str
    sources: Mapping[str, Source]
    """By instance_id."""
    readers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The forks that read from an instance, by its instance_id."""
    parents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The instances that a target reads from now, by the target's instance_id."""
    other_ranks: tuple[str, ...] = ()
    """Keys of the model's ranks that somebody does hold, for the reason of a plan without routes."""

    def other_readers(self, source: Source, fork_id: str) -> int:
        """How many forks other than `fork_id` read from the source."""
        return len(self.readers.get(source.instance_id, frozenset()) - {fork_id})


@dataclass(frozen=True)
class Demand:
    """A fork that needs a plan."""

    fork_id: str
    target: Source
    blamed: Mapping[str, str] = field(default_factory=dict)
    """Instances that failed this fork, and how."""


@dataclass(frozen=True)
class Assignment:
    """Chunks to read from one source, over the transports that both offer (the target's best first)."""

    source_id: str
    chunks: tuple[Range, ...]
    transports: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """The routes of a plan; where there are none, `reason` says why."""

    weights_id: str | None
    assignments: tuple[Assignment, ...]
    reason: str
    full: bool = False
    """Whether a source would serve once one of its readers has finished."""
    other_layout: str | None = None
    """Whom to compare with (instance_id), where all that hold the model hold another layout."""


def distance(left: Place, right: Place) -> int:
    """0 on one host, 1 in one rack, 2 in one zone, 3 beyond or where it is not known."""
    if left.host == right.host:
        return 0
    same_zone = left.zone == right.zone
    if left.rack is not None and left.rack == right.rack and same_zone:
        return 1
    return 2 if left.zone is not None and same_zone else 3
