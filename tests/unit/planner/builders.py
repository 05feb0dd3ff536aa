"""Builders for the planner's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from planner.clock import Clock
from planner.core.state import MAX_FINISHED_FORKS
from planner.metrics import Metrics
from planner.plan_service import PlanService
from planner.policy.group_plan import plan
from planner.policy.types import (
    ChunkShare,
    ForkDemand,
    GroupView,
    HostLocation,
    PlanDecision,
    Source,
    Storage,
)
from planner.store.memory import MemoryStore
from rfork.image.ranges import Range, count
from rfork.schema import ForkRequest, InstanceReport, Placement, Rank, SourceFault, StorageCandidate
from rfork.settings import PlannerSettings

VERSION: Final = "v1"
LAYOUT: Final = "a" * 32
OTHER_LAYOUT: Final = "b" * 32
WEIGHTS: Final = "1" * 32
OTHER_WEIGHTS: Final = "2" * 32
ORIGIN: Final = "d" * 32
OTHER_ORIGIN: Final = "e" * 32
CHUNKS: Final = 12
NOW: Final = 100.0
SNAPSHOT: Final = Storage("snapshot", "file:///s", ORIGIN, WEIGHTS)
CHECKPOINT: Final = Storage("checkpoint", "file:///c", ORIGIN)
LOADER: Final = Storage("loader")


def seed(instance_id: str, **changes: object) -> Source:
    """Return a complete source on its own host, alive at NOW."""
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
        location=HostLocation(f"host-{instance_id}"),
        max_readers=2,
        expires_at=NOW + 1,
    )
    return replace(source, **changes)  # type: ignore[arg-type]  # each test names fields of Source


def loading(instance_id: str, *verified: Range, **changes: object) -> Source:
    """Return a target, or a relay, with the chunks `verified`."""
    weights_id = WEIGHTS if verified else None
    return seed(instance_id, **({"state": "loading", "verified": verified, "weights_id": weights_id} | changes))


Reads = Mapping[str, Mapping[str, tuple[Range, ...]]]
"""Chunks by source, by target; a target that is its own source reads its storage."""


def group(*sources: Source, reads: Reads | None = None, other_ranks: tuple[str, ...] = ()) -> GroupView:
    """Return a group in which each target in `reads` runs the fork `fork-TARGET` over those sources."""
    readers: dict[str, dict[str, float]] = {}
    local: dict[str, set[str]] = {}
    shares: dict[str, tuple[ChunkShare, ...]] = {}
    members = {source.instance_id: source for source in sources}
    for target, parts in (reads or {}).items():
        shares[target] = tuple(ChunkShare(source, chunks) for source, chunks in parts.items())
        for source, chunks in parts.items():
            if source != target:
                readers.setdefault(source, {})[f"fork-{target}"] = count(chunks) / CHUNKS
            if source in members and target in members and is_same_host_read(members[source], members[target]):
                local.setdefault(source, set()).add(f"fork-{target}")
    hosts: dict[str, list[str]] = {}
    for name, member in members.items():
        hosts.setdefault(member.location.host, []).append(name)
    return GroupView(
        model="m",
        rank_key="r",
        sources=members,
        readers=readers,
        same_host_readers=local,
        shares=shares,
        background_forks={f"fork-{name}": name for name in shares if name in members and members[name].background},
        shared_hosts={host: names for host, names in hosts.items() if any(members[name].background for name in names)},
        other_ranks=other_ranks,
    )


def common_transports(source: Source, target: Source) -> tuple[str, ...]:
    """Return the transports that work between the two: in the target's order, but kernels last."""
    same_host = source.location.host == target.location.host
    both = [name for name in target.transports if name in source.transports]
    both = [name for name in both if same_host or name not in ("cuda_ipc", "shared_memory")]
    return tuple(name for kernels in (False, True) for name in both if (name == "nccl") == kernels)


def is_same_host_read(source: Source, target: Source) -> bool:
    """Return True if the target reads from the source over a same-host transport."""
    return common_transports(source, target)[:1] in (("cuda_ipc",), ("shared_memory",))


def demand(target: Source, *current: ChunkShare, **blamed: str) -> ForkDemand:
    """Return the demand of `fork-TARGET`."""
    return ForkDemand(f"fork-{target.instance_id}", target, blamed, current)


def decide(fleet: GroupView, target: Source, **blamed: str) -> PlanDecision:
    """Return the decision for `fork-TARGET` with its reads in the fleet as current shares, at NOW."""
    fork_demand = demand(target, *fleet.shares.get(target.instance_id, ()), **blamed)
    return plan(fleet, [fork_demand], NOW)[fork_demand.fork_id]


def plan_together(fleet: GroupView, *targets: Source) -> dict[str, dict[str, tuple[Range, ...]]]:
    """Return the chunks by source for several targets that are planned in one call."""
    decisions = plan(fleet, [demand(target) for target in targets], NOW)
    return {target.instance_id: routes(decisions[f"fork-{target.instance_id}"]) for target in targets}


def targets(number: int, **changes: object) -> list[Source]:
    """Return targets without chunks: t00, t01, …, each on its own host."""
    return [loading(f"t{index:02}", **changes) for index in range(number)]


def apply_decisions(
    fleet: GroupView, demands: Sequence[ForkDemand], decisions: Mapping[str, PlanDecision]
) -> GroupView:
    """Return the fleet after all targets have begun to read as decided."""
    forks = {demand.fork_id for demand in demands}
    readers = {
        source: {fork: part for fork, part in there.items() if fork not in forks}
        for source, there in fleet.readers.items()
    }
    local = {source: set(there) - forks for source, there in fleet.same_host_readers.items()}
    members = {**fleet.sources, **{demand.target.instance_id: demand.target for demand in demands}}
    shares, background = dict(fleet.shares), dict(fleet.background_forks)
    for demand in demands:
        if demand.target.background:
            background[demand.fork_id] = demand.target.instance_id
        decision, target_id = decisions[demand.fork_id], demand.target.instance_id
        shares[target_id] = decision.shares + tuple(ChunkShare(target_id, chunks) for _, chunks in decision.storage)
        for share in decision.shares:
            part = count(share.chunks) / max(1, demand.target.chunk_count)
            readers.setdefault(share.source_id, {})[demand.fork_id] = part
            if is_same_host_read(members[share.source_id], demand.target):
                local.setdefault(share.source_id, set()).add(demand.fork_id)
    return replace(
        fleet, sources=members, readers=readers, same_host_readers=local, shares=shares, background_forks=background
    )


def routes(decision: PlanDecision) -> dict[str, tuple[Range, ...]]:
    """Return the chunks by source; storage by its kind."""
    peers = {each.source_id: each.chunks for each in decision.assignments}
    return peers | {storage.kind: chunks for storage, chunks in decision.storage}


@dataclass
class FakeTime:
    """Clocks that tests set."""

    now: float = 1000.0
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(monotonic=lambda: self.now, unix=lambda: self.now)


def make_service(
    time: FakeTime, store: MemoryStore | None = None, max_finished_forks: int = MAX_FINISHED_FORKS, **settings: object
) -> PlanService:
    """Return a service without an application; it plans immediately unless configured otherwise."""
    chosen = PlannerSettings.model_validate({"lease_keys": "s" * 32, "batch_window_s": 0, **settings})
    store = store or MemoryStore(time.clock, max_finished_forks=max_finished_forks)
    return PlanService(chosen, store, time.clock, Metrics())


def report(instance_id: str, *verified: Range, **changes: object) -> InstanceReport:
    """Return a heartbeat: of a seed if `verified` is everything, else of a target."""
    complete = verified == ((0, CHUNKS),)
    return InstanceReport.model_validate(
        {
            "instance_id": instance_id,
            "model": "m",
            "version": VERSION,
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


def seed_report(instance_id: str, **changes: object) -> InstanceReport:
    """Return a seed's heartbeat."""
    return report(instance_id, (0, CHUNKS), **changes)


def fork_request(target: str, *verified: Range, faults: tuple[SourceFault, ...] = (), **changes: object) -> ForkRequest:
    """Return the request of `fork-TARGET`."""
    return ForkRequest(fork_id=f"fork-{target}", instance=report(target, *verified, **changes), faults=faults)


async def accuse(service: PlanService, source: str, *, by: str) -> None:
    """Let these targets, each on its own host, report corrupt bytes from `source`."""
    for name in by:
        await service.plan(fork_request(name, max_readers=0))
        await service.plan(fork_request(name, max_readers=0, faults=(fault(source, "SourceCorrupt"),)))


def storage_candidates(*storages: Storage) -> tuple[StorageCandidate, ...]:
    """Return storage as an instance reports it."""
    return tuple(
        StorageCandidate(kind=each.kind, uri=each.uri, origin=each.origin, weights_id=each.weights_id)
        for each in storages
    )


def fault(instance_id: str, error: str, fault_type: str = "source") -> SourceFault:
    """Return a target's report of a source that failed."""
    return SourceFault.model_validate({"instance_id": instance_id, "fault": fault_type, "error": error})
