"""Short ways to build what the planner's tests talk about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from planner.fleet import Decision, Demand, Group, Place, Source
from planner.leases import Clock
from planner.policy import plan
from rfork.image.ranges import Range
from rfork.wire import ForkRequest, InstanceReport, Placement, Rank, SourceFault

LAYOUT: Final = "a" * 32
OTHER_LAYOUT: Final = "b" * 32
WEIGHTS: Final = "1" * 32
OTHER_WEIGHTS: Final = "2" * 32
CHUNKS: Final = 12
NOW: Final = 100.0


def seed(instance_id: str, **changes: object) -> Source:
    """A complete source on a host of its own, alive at NOW."""
    source = Source(
        instance_id=instance_id,
        address=f"{instance_id}:1",
        layout_id=LAYOUT,
        weights_id=WEIGHTS,
        generation=0,
        chunk_count=CHUNKS,
        state="serving",
        verified=((0, CHUNKS),),
        transports=("http",),
        place=Place(f"host-{instance_id}"),
        max_readers=2,
        expires_at=NOW + 1,
    )
    return replace(source, **changes)  # type: ignore[arg-type]  # each test names fields of Source


def loading(instance_id: str, *verified: Range, **changes: object) -> Source:
    """A target, or a relay, that holds `verified`."""
    weights_id = WEIGHTS if verified else None
    return seed(
        instance_id, **({"state": "loading", "verified": verified, "weights_id": weights_id} | changes)
    )


def group(
    *sources: Source, reads: Mapping[str, tuple[str, ...]] | None = None, other_ranks: tuple[str, ...] = ()
) -> Group:
    """A group in which each target in `reads` runs the fork `fork-TARGET` over those sources."""
    reads = reads or {}
    readers: dict[str, set[str]] = {}
    for target, parents in reads.items():
        for parent in parents:
            readers.setdefault(parent, set()).add(f"fork-{target}")
    return Group(
        model="m",
        rank_key="r",
        sources={source.instance_id: source for source in sources},
        readers={name: frozenset(forks) for name, forks in readers.items()},
        parents=dict(reads),
        other_ranks=other_ranks,
    )


def decide(fleet: Group, target: Source, **blamed: str) -> Decision:
    """The decision for `fork-TARGET` at NOW."""
    return plan(fleet, Demand(f"fork-{target.instance_id}", target, blamed), NOW)


def routes(decision: Decision) -> dict[str, tuple[Range, ...]]:
    """Chunks by source."""
    return {each.source_id: each.chunks for each in decision.assignments}


@dataclass
class FakeTime:
    """Clocks that move when told."""

    now: float = 1000.0
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(monotonic=lambda: self.now, unix=lambda: self.now)


def report(instance_id: str, *verified: Range, **changes: object) -> InstanceReport:
    """A heartbeat: of a seed where `verified` is everything, else of a target."""
    complete = verified == ((0, CHUNKS),)
    return InstanceReport.model_validate(
        {
            "instance_id": instance_id,
            "model": "m",
            "rank": Rank(),
            "layout_id": LAYOUT,
            "weights_id": WEIGHTS if verified else None,
            "image_bytes": CHUNKS << 20,
            "chunk_count": CHUNKS,
            "state": "serving" if complete else "loading",
            "verified": verified,
            "address": f"{instance_id}:1",
            "transports": ("http",),
            "placement": Placement(host=f"host-{instance_id}"),
            "max_readers": 1,
        }
        | changes
    )


def whole(instance_id: str, **changes: object) -> InstanceReport:
    """A seed's heartbeat."""
    return report(instance_id, (0, CHUNKS), **changes)


def ask(
    target: str, *verified: Range, faults: tuple[SourceFault, ...] = (), **changes: object
) -> ForkRequest:
    """The request of `fork-TARGET`."""
    return ForkRequest(fork_id=f"fork-{target}", instance=report(target, *verified, **changes), faults=faults)


def fault(instance_id: str, error: str, kind: str = "source") -> SourceFault:
    """What a target says of a source that failed it."""
    return SourceFault.model_validate({"instance_id": instance_id, "fault": kind, "error": error})
