"""Fleet of `benchmarks.planner_load`: the reports of each rank, and the requests of each fork.

R ranks, one per host; most are seeds with every chunk, the others are targets that fork in a loop: each ends
its fork and requests one with a new id, as a restarted instance would. So the planner's state is steady: R
instances, and as many running forks as there are targets.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.planner_load.client import Call, Caller, request
from rfork.errors import RforkError
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

HEARTBEAT, PLAN, REPLAN, PROGRESS, FINISH = "heartbeat", "plan", "plan again", "progress", "finish"
FORK_CALLS = (PLAN, REPLAN, PROGRESS, FINISH)
CALL_TYPES = (*FORK_CALLS, HEARTBEAT)


class CallerPool:
    """All ranks of one fleet, each target with its current plan; its callers share one planner."""

    def __init__(self, fleet: LoadFleet) -> None:
        self.fleet = fleet
        self._heartbeats = [_report(seed) for seed in fleet.seeds()]
        self._next_beat = itertools.cycle(self._heartbeats)
        self._targets = fleet.targets
        self._turn = itertools.cycle(range(len(self._targets)))
        self._fork_numbers = dict.fromkeys(self._targets, 0)
        self._plans: dict[int, Plan] = {}

    def register(self, connections: int) -> list[Caller]:
        """Return callers that together register every seed once, as fast as possible."""
        return [self._send(self._heartbeats[part::connections]) for part in range(connections)]

    def request_all(self) -> Caller:
        """Return callers that start every target's first fork and bring it half way.

        A planner that has just started plans nothing until it expects the first heartbeat of each instance.
        """
        early = _encode_fork_request(self.fleet.fork_request(self._targets[0], 0))
        for _ in range(MAX_RETRIES):
            if Plan.model_validate_json((yield Call(PLAN, early))).routes:
                break
            time.sleep(RETRY_S)
        for number in self._targets:
            yield from self._begin(number)

    def rounds(self, count: int) -> Caller:
        """Return a caller that makes one call of each type, `count` times, without concurrent calls."""
        for _ in range(count):
            yield Call(HEARTBEAT, next(self._next_beat))
            yield from self._next_fork(self._targets[next(self._turn)])

    def heartbeats(self, connections: int, rate: float, seconds: float) -> list[Caller]:
        """Return callers that together send `rate` heartbeats per second (0: as many as possible)."""
        return [self._paced_beats(part, connections, rate, seconds) for part in range(connections)]

    def forks(self, connections: int, rate: float, seconds: float) -> list[Caller]:
        """Return callers that together end and start `rate` forks per second (0: as many as possible)."""
        return [self._paced_forks(part, connections, rate, seconds) for part in range(connections)]

    def _send(self, requests: Sequence[bytes]) -> Caller:
        for each in requests:
            yield Call(HEARTBEAT, each)

    def _paced_beats(self, part: int, parts: int, rate: float, seconds: float) -> Caller:
        for due in _times(part, parts, rate, seconds):
            yield Call(HEARTBEAT, next(self._next_beat), due)

    def _paced_forks(self, part: int, parts: int, rate: float, seconds: float) -> Caller:
        own_targets = itertools.cycle(self._targets[part::parts])
        for due in _times(part, parts, rate, seconds):
            yield from self._next_fork(next(own_targets), due)

    def _next_fork(self, number: int, due: float = 0.0) -> Caller:
        """End the target's fork, and bring its next one half way."""
        path = f"/v1/forks/{fork_id(number, self._fork_numbers[number])}/finish"
        yield Call(FINISH, request("POST", path, finish(self._plans[number]).model_dump_json()), due)
        yield from self._begin(number)

    def _begin(self, number: int) -> Caller:
        self._fork_numbers[number] += 1
        first = self.fleet.fork_request(number, self._fork_numbers[number])
        plan = _planned((yield Call(PLAN, _encode_fork_request(first))))
        path = f"/v1/forks/{first.fork_id}/progress"
        yield Call(PROGRESS, request("POST", path, progress(plan).model_dump_json()))
        replan = self.fleet.replan_request(first, plan)
        self._plans[number] = _planned((yield Call(REPLAN, _encode_fork_request(replan))))


def _times(part: int, parts: int, rate: float, seconds: float) -> Iterator[float]:
    """Yield when one of `parts` callers is due during the next `seconds`; 0 (immediately) if `rate` is 0."""
    began = time.perf_counter()
    for number in itertools.count(part, parts):
        due = began + number / rate if rate else 0.0
        if max(due, time.perf_counter()) >= began + seconds:
            return
        yield due


def _report(report: InstanceReport) -> bytes:
    return request("PUT", f"/v1/instances/{report.instance_id}", report.model_dump_json())


def _encode_fork_request(fork_request: ForkRequest) -> bytes:
    return request("POST", "/v1/forks", fork_request.model_dump_json())


def _planned(body: bytes) -> Plan:
    """Return the plan in a response. Raises RforkError if it has nothing to read, which is not worth timing."""
    plan = Plan.model_validate_json(body)
    if not plan.routes:
        raise RforkError(f"{plan.fork_id} has nothing to read: {plan.reason}")
    return plan


MODEL = "meta-llama/Llama-3.1-70B-Instruct"
VERSION = "files:9f86d081884c7d659a2feaa0c55ad015"
FILES = "file:///models/llama-70b"
CHUNKS, CHUNK_BYTES = 64, 256 << 20
HALF = ((0, CHUNKS // 2),)
READERS = 4
HOSTS_A_RACK, RACKS_A_ZONE = 32, 64
RETRY_S, MAX_RETRIES = 0.1, 100
MAX_TARGETS = 300
"""Running forks of a large fleet; of a small one, three tenths of the ranks."""


@dataclass(frozen=True)
class LoadFleet:
    """Ranks that one planner knows; with `keys` = 1 all share one group.

    A rank that is a complete model states no version: the planner derives it from the weights. A part of a model has to
    state one.
    """

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
            version=VERSION if self.keys > 1 else None,
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
