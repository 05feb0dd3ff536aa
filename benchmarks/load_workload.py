"""Callers of `benchmarks.planner_load`: seeds that send heartbeats, targets that fork in a loop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from benchmarks.load_client import Call, Caller, request
from benchmarks.load_fleet import LoadFleet, finish, fork_id, progress
from rfork.errors import RforkError
from rfork.schema import ForkRequest, InstanceReport, Plan

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
        """Return callers that start every target's first fork and bring it half way."""
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
