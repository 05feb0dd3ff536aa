"""Fleet of `benchmarks.planner_load`: the reports of each rank, and the requests of each fork.

R ranks, one per host; most are seeds with every chunk, the others are targets that fork in a loop: each ends
its fork and requests one with a new id, as a restarted instance would. So the planner's state is steady: R
instances, and as many running forks as there are targets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from rfork.schema import (
    ChunkAssignment,
    ForkProgress,
    ForkRequest,
    ForkResult,
    InstanceReport,
    Placement,
    Plan,
    Rank,
    StorageCandidate,
)

MODEL = "meta-llama/Llama-3.1-70B-Instruct"
FILES = "file:///models/llama-70b"
CHUNKS, CHUNK_BYTES = 64, 256 << 20
HALF = ((0, CHUNKS // 2),)
READERS = 4
HOSTS_A_RACK, RACKS_A_ZONE = 32, 64
MAX_TARGETS = 300
"""Running forks of a large fleet; of a small one, three tenths of the ranks."""


@dataclass(frozen=True)
class LoadFleet:
    """Ranks that one planner knows; with `keys` = 1 all share one group."""

    ranks: int
    keys: int = 1
    batch_s: float = 0.0
    """The planner's batch window; 0: every arrival is planned immediately."""

    @property
    def name(self) -> str:
        """Name of the fleet in the table."""
        parts = f" in {self.keys} groups" if self.keys > 1 else ""
        return f"{self.ranks:,} ranks{parts}" + (f", window {self.batch_s:g} s" if self.batch_s else "")

    @property
    def target_count(self) -> int:
        """Number of targets, each with a running fork."""
        return min(MAX_TARGETS, self.ranks * 3 // 10)

    @property
    def targets(self) -> list[int]:
        """Numbers of the ranks that fork, spread over the hosts."""
        return [number * self.ranks // self.target_count for number in range(self.target_count)]

    def seeds(self) -> Iterator[InstanceReport]:
        """Reports of the other ranks, each with all chunks verified."""
        loading = set(self.targets)
        for number in range(self.ranks):
            if number not in loading:
                yield self._report(number, serving=True)

    def fork_request(self, number: int, fork_index: int) -> ForkRequest:
        """Return the target's first request in its `fork_index`: it has nothing yet."""
        return ForkRequest(fork_id=fork_id(number, fork_index), instance=self._report(number, serving=False))

    def replan_request(self, first: ForkRequest, plan: Plan) -> ForkRequest:
        """Return the replan request half way through, with the remaining assignments of the current plan."""
        update = {"weights_id": plan.weights_id, "verified": HALF}
        return ForkRequest(
            fork_id=first.fork_id,
            instance=first.instance.model_copy(update=update),
            current_assignments=tuple(
                ChunkAssignment(source_id=route.source_id, chunks=route.chunks) for route in plan.routes
            ),
        )

    def _report(self, number: int, *, serving: bool) -> InstanceReport:
        rank = Rank(tp=number % self.keys, tp_size=self.keys, dp=number // self.keys)
        rack = number // HOSTS_A_RACK
        return InstanceReport(
            instance_id=f"llama-70b-{number // self.keys:05d}-rank-{number % self.keys}",
            model=MODEL,
            rank=rank,
            layout_id=_hex("layout", rank.key),
            weights_id=_hex("weights", rank.key) if serving else None,
            image_bytes=CHUNKS * CHUNK_BYTES,
            chunk_count=CHUNKS,
            state="serving" if serving else "loading",
            verified=((0, CHUNKS),) if serving else (),
            storage=(
                StorageCandidate(kind="checkpoint", uri=FILES, origin=_hex("files", rank.key)),
                StorageCandidate(kind="loader"),
            ),
            address=f"10.{number >> 14 & 63}.{number >> 7 & 127}.{number & 127}:41234",
            transports=("transfer_engine", "http"),
            placement=Placement(
                host=f"node-{number:05d}", rack=f"rack-{rack:03d}", zone=f"zone-{rack // RACKS_A_ZONE}"
            ),
            max_readers=READERS,
        )


def fork_id(number: int, fork_index: int) -> str:
    """Return the id of a target's fork."""
    return f"fork-{number:05d}-{fork_index}"


def progress(plan: Plan) -> ForkProgress:
    """Return a target's progress report half way."""
    read = CHUNKS * CHUNK_BYTES // 2
    source = plan.routes[0].source_id if plan.routes else f"checkpoint:{FILES}"
    return ForkProgress(verified=HALF, bytes_read=read, bytes_per_s=2.4e10, sources={source: read})


def finish(plan: Plan) -> ForkResult:
    """Return a target's final report."""
    return ForkResult(
        outcome="forked",
        seconds=0.75,
        bytes_read=CHUNKS * CHUNK_BYTES,
        sources={route.source_id: CHUNKS * CHUNK_BYTES // len(plan.routes) for route in plan.routes},
        efficiency=0.95,
    )


def _hex(*words: str) -> str:
    return hashlib.sha256("/".join(words).encode()).hexdigest()[:32]
