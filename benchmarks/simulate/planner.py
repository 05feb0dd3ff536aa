"""Planner in the simulation: the real policy, over the index that the planner keeps of a group.

The registry's handling of reports, progress and faults is simplified here: no leases, tokens or logs.
`planner.policy.group_plan` alone decides which target reads what from which source. Sets of chunks are passed
as bits; times are in S/B and are passed to the policy in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.simulate.fleet import IMAGE_BYTES, IMAGE_SECONDS, LINK_BYTES_PER_S
from benchmarks.simulate.network import INSTANT
from planner.core.group_index import GroupIndex
from planner.core.records import ForkRecord, GroupKey
from planner.core.records import RouteRecord as PlannedRead
from planner.plan_service import RATE_WINDOW_S
from planner.policy import group_plan
from planner.policy.starvation import is_starving
from planner.policy.transports import is_same_host_route
from planner.policy.types import ChunkShare, ForkDemand, HostLocation, PlanDecision, Source
from rfork.image.ranges import Range
from rfork.receiver.source_reads import ActiveRates
from rfork.schema import Rank

LAYOUT, WEIGHTS, VERSION, RANK = "layout", "weights", "v1", Rank()
MAX_READERS: Final = 4
MIN_ELAPSED_S: Final = 0.1
NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class SimPlanRequest:
    """A target that needs a plan."""

    name: str
    chunks: int
    excluded: frozenset[str]
    current: Mapping[str, int]
    """Chunks that it still has to read by its current plan, by source."""


@dataclass(frozen=True, slots=True)
class SimPlanResponse:
    """Chunks for a target, by source; `replan_suggested`: whether to request a plan again soon."""

    shares: Mapping[str, int]
    replan_suggested: bool
    reason: str


class SimPlanner:
    """Plans for one group; counts the wall time of planning and of straggler detection."""

    def __init__(self, chunk_count: int) -> None:
        self.plan_seconds = 0.0
        self.watch_seconds = 0.0
        self._chunk_count = chunk_count
        self._reports: dict[str, list[tuple[float, int]]] = {}
        """Times and numbers of chunks of each target's reports within the last `RATE_WINDOW_S`, and of one before."""
        self._group = GroupIndex(GroupKey("model", VERSION, RANK.key))
        self._sources: dict[str, Source] = {}
        self._forks: dict[str, ForkRecord] = {}
        self._slow_reports = group_plan.SlowReports()

    def join(self, name: str, *, complete: bool, host: str | None = None, measured: float | None = None) -> None:
        """Register an instance, on a separate host unless one is named.

        `measured` is its known read rate, as a part of B.
        """
        source = Source(
            instance_id=name,
            address=name,
            layout_id=LAYOUT,
            weights_id=WEIGHTS if complete else None,
            generation=0,
            chunk_count=self._chunk_count,
            state="serving" if complete else "loading",
            verified=((0, self._chunk_count),) if complete else (),
            transports=("shared_memory", "http"),
            location=HostLocation(host=host or name),
            max_readers=MAX_READERS,
            expires_at=NEVER,
            ingress_rate=None if measured is None else measured * LINK_BYTES_PER_S,
        )
        if complete:
            self._put(source)
        else:
            self._sources[name] = source  # joins the group once it has a plan

    def progress(self, name: str, chunks: int, rates: ActiveRates, now: float) -> None:
        """Report the chunks that a target has verified, and its rates while it read; its read rate over the last
        `RATE_WINDOW_S`, or at first since its plan, is derived from the chunks.
        """
        source = self._sources[name]
        fork = self._forks.get(name)
        now_s = now * IMAGE_SECONDS
        planned_at = fork.planned_at if fork is not None else now_s
        reports = self._reports.setdefault(name, [(planned_at, 0)])
        is_older_than_plan = len(reports) > 1 and now_s < planned_at + RATE_WINDOW_S - INSTANT
        reports.append((now_s, chunks.bit_count()))
        while len(reports) > 2 and reports[1][0] <= now_s - RATE_WINDOW_S + INSTANT:
            del reports[0]
        began_at, before = reports[0]
        elapsed_s = min(max(now_s - began_at, MIN_ELAPSED_S), RATE_WINDOW_S)
        rate = (chunks.bit_count() - before) / self._chunk_count * IMAGE_BYTES / elapsed_s
        same_host_read = fork is not None and any(is_same_host_route(read.transports) for read in fork.reads)
        if same_host_read:
            rate = 0.0  # shows nothing about its link
        self._put(
            replace(
                source,
                weights_id=WEIGHTS if chunks else source.weights_id,
                verified=ranges_of(chunks),
                ingress_rate=max(rate, source.ingress_rate or 0.0) or None,
                # A rate of which a part is older than the plan shows nothing about the plan's sources.
                read_rate=None if same_host_read or is_older_than_plan else rate,
                active_rate=None if same_host_read else rates.total,
                source_rates={} if same_host_read else rates.by_source,
            )
        )

    def finished(self, name: str) -> None:
        """Record that a target has everything: its fork ends, and it serves."""
        self._group.end_fork(self._forks.pop(name))
        all_chunks = ((0, self._chunk_count),)
        self._put(replace(self._sources[name], weights_id=WEIGHTS, verified=all_chunks, state="serving"))

    def remove(self, name: str) -> None:
        """Remove a dead instance and its fork."""
        fork = self._forks.pop(name, None)
        if fork is not None:
            self._group.end_fork(fork)
        if self._sources.pop(name, None) is not None:
            self._group.remove(name)

    def stragglers(self, now: float) -> list[str]:
        """Mark the relays that fall behind their sources; returns the newly marked ones."""
        begin = time.perf_counter()
        suspects = {
            name: self._reports[name][-1][0]
            for name in sorted(group_plan.stragglers(self._group.view(()), now * IMAGE_SECONDS))
        }
        slow = [name for name in self._slow_reports.confirmed(suspects) if not self._sources[name].slow]
        for name in slow:
            self._put(replace(self._sources[name], slow=True))
        self.watch_seconds += time.perf_counter() - begin
        return slow

    def starving(self, reporting: Sequence[str]) -> list[str]:
        """Return the targets that are advised to request a plan with the response to their report.

        Each idle seed is offered once: the plan of the first target makes it busy.
        """
        begin = time.perf_counter()
        group, found, idle = self._group.view(()), list[str](), list[Source]()
        if self._forks:
            idle = self._group.idle_seeds(self._sources[next(iter(self._forks))], len(self._forks))
        for name in reporting:
            if idle and is_starving(group, self._sources[name], idle[-1]):
                found.append(name)
                idle.pop()
        self.watch_seconds += time.perf_counter() - begin
        return found

    def plan(self, requests: Sequence[SimPlanRequest], now: float) -> dict[str, SimPlanResponse]:
        """Make one plan for all requests; returns the responses by name."""
        begin = time.perf_counter()
        demands = [self._demand(request) for request in requests]
        decisions = group_plan.plan(self._group.view(demands), demands, now * IMAGE_SECONDS)
        for demand in demands:
            self._put(replace(demand.target, read_rate=None))
            self._apply_decision(demand.fork_id, decisions[demand.fork_id], now)
        self.plan_seconds += time.perf_counter() - begin
        return {
            name: SimPlanResponse(
                {each.source_id: bits_of(each.chunks) for each in decision.assignments},
                replan_suggested=decision.no_free_slot,
                reason=decision.reason,
            )
            for name, decision in decisions.items()
        }

    def _demand(self, request: SimPlanRequest) -> ForkDemand:
        target = replace(
            self._sources[request.name],
            verified=ranges_of(request.chunks),
            weights_id=WEIGHTS if request.chunks else None,
        )
        return ForkDemand(
            fork_id=request.name,
            target=target,
            excluded=dict.fromkeys(request.excluded, "gone"),
            current_shares=tuple(ChunkShare(source, ranges_of(chunks)) for source, chunks in request.current.items()),
        )

    def _apply_decision(self, name: str, decision: PlanDecision, now: float) -> None:
        fork = ForkRecord(
            fork_id=name,
            instance_id=name,
            model=self._group.model,
            rank=RANK,
            version=VERSION,
            chunk_count=self._chunk_count,
            image_bytes=IMAGE_BYTES,
            requested_at=now * IMAGE_SECONDS,
            seen_at=now * IMAGE_SECONDS,
            planned_at=now * IMAGE_SECONDS,
            reads=tuple(
                PlannedRead(each.source_id, each.chunks, each.transports, generation=0) for each in decision.assignments
            ),
            weights_id=decision.weights_id,
        )
        self._forks[name] = fork
        self._group.apply_plan(fork)

    def _put(self, source: Source) -> None:
        self._sources[source.instance_id] = source
        self._group.put(source)


def ranges_of(chunks: int) -> tuple[Range, ...]:
    """Return the ranges of a set of chunks."""
    found: list[Range] = []
    begin = 0
    while chunks:
        gap = (chunks & -chunks).bit_length() - 1
        chunks >>= gap
        run = (~chunks & (chunks + 1)).bit_length() - 1
        chunks >>= run
        found.append((begin + gap, begin + gap + run))
        begin += gap + run
    return tuple(found)


def bits_of(ranges: Sequence[Range]) -> int:
    """Return the set of the chunks in these ranges."""
    return sum((1 << end) - (1 << begin) for begin, end in ranges)
