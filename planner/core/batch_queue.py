"""Batches fork requests that arrive within a short window, so that they share one plan. A state machine.

Batches of a group are chained: each reads from the ones before it, so a burst of arrivals must not become
many batches. While several requests keep arriving, the window grows with the time since the first. A single
fork should not wait: if there was no recent request and no other arrives after a moment, it is planned
immediately.

Replans are planned together too, separately from first plans: the readers of a dead or slow source replan at
the same time, and the order in which they are planned decides who waits for whom. One that lost a source waits
for the minimum window at most, and hardly if it is the only one; one whose sources still work reads on meanwhile
and waits longer.

The requests of an announced scale-up (`planner.core.scaleups`) are known in advance: the first waits until
all have arrived, and then none waits any longer. Requests that arrive at two planner replicas are planned in
two batches, the later on top of the earlier.

`now` is the time on this process's monotonic clock; `store_now`, on which scale-ups expire, on the clock of
the records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from planner.core.records import GroupKey
from planner.core.requests import PlanContext
from planner.core.state import PlannerState

MAX_BATCH: Final = 2048
"""Maximum requests per batch, so that one call of the policy does not delay other work for long."""
MAX_WINDOW_S: Final = 1.0
"""Maximum window: a fork lasts seconds, and a waiting one makes no progress."""
WINDOW_GROWTH: Final = 0.6
"""Length of the next window, as a fraction of the time since the burst began: what a target waits for its plan at
most. Each batch adds a link between the source and all later ones, so short windows delay the end (simulated: 0.5
costs the last target 2 % more of a transfer, 1.0 saves it 3 %).
"""
SOLO_WINDOW_S: Final = 0.002
"""Requests that were sent together all arrive within this time of the first."""

REPLAN_WINDOW_S: Final = 0.05
"""Window of replans whose targets read on meanwhile: short against the interval of progress reports (1 s), whose
responses suggest these replans, because a target has only one request at a time and may lose a source meanwhile.
"""


def window_s(age_s: float, min_wait_s: float) -> float:
    """Return how long a batch waits for more requests, in a burst of age `age_s`."""
    return max(min_wait_s, min(WINDOW_GROWTH * age_s, MAX_WINDOW_S))


def replan_window_s(min_wait_s: float, *, reads_on: bool) -> float:
    """Return how long a replan waits for others; `reads_on`: its sources serve all that its target is missing."""
    return max(min_wait_s, REPLAN_WINDOW_S) if reads_on else min_wait_s


class BatchPurpose(Enum):
    """Type of the requests of a batch: only those of one type are planned together."""

    ARRIVALS = "arrivals"
    SCALEUP = "scaleup"
    REPLANS = "replans"


@dataclass(eq=False)
class Batch:
    """Requests of one group that are planned together."""

    group: GroupKey
    purpose: BatchPurpose
    opened_at: float
    due_at: float
    """When it is planned at the latest."""
    solo_due_at: float
    """When it is planned if it has only one request by then."""
    requests: dict[str, PlanContext] = field(default_factory=dict)
    """By instance_id: if an instance sends requests under two ids, the later one counts."""

    @property
    def is_scaleup(self) -> bool:
        """True if it waits for announced replicas."""
        return self.purpose is BatchPurpose.SCALEUP


@dataclass
class _Burst:
    """Arrivals that follow one another closely.

    `single_since`: when the last batch was closed, if it had one request. Arrivals are then sequential, and
    none should wait long for others.
    """

    began_at: float
    expires_at: float
    single_since: float | None = None


class BatchQueue:
    """Requests that wait for others of their group."""

    def __init__(self, state: PlannerState, min_wait_s: float, scaleup_wait_s: float) -> None:
        """`min_wait_s`: window of the first batch of a burst, and of replans; 0: only announced scale-ups wait.
        `scaleup_wait_s`: maximum wait for announced replicas; 0: their requests are planned like any others.
        """
        self._state = state
        self._min_wait_s = min_wait_s
        self._scaleup_wait_s = scaleup_wait_s
        self._open: dict[tuple[GroupKey, BatchPurpose], Batch] = {}
        self._full: list[Batch] = []
        self._bursts: dict[GroupKey, _Burst] = {}

    def add(self, request: PlanContext, now: float, store_now: float) -> Batch | None:
        """Add a request to its batch, which may be new. None if it is to be planned alone, immediately.

        A holder's fork waits for no other: it is planned again anyway when an engine needs its sources.
        """
        if request.target.report.holder is not None:
            return None
        purpose = self._purpose_of(request, store_now)
        if purpose is not BatchPurpose.SCALEUP and self._min_wait_s <= 0:
            return None
        key = request.group, purpose
        batch = self._open.get(key)
        if batch is None or len(batch.requests) >= MAX_BATCH:
            if batch is not None:
                self._full.append(batch)
            batch = self._open[key] = self._new_batch(request, purpose, now)
        if purpose is BatchPurpose.REPLANS:
            batch.due_at = min(batch.due_at, now + self._replan_window_s(request))
            batch.solo_due_at = min(batch.solo_due_at, batch.due_at)
        batch.requests[request.instance_id] = request
        return batch

    def remove(self, fork_id: str) -> None:
        """Remove a fork that ended while it waited, so that no other fork is chained to it."""
        for batch in (*self._full, *self._open.values()):
            for instance_id, request in batch.requests.items():
                if request.fork_id == fork_id:
                    del batch.requests[instance_id]
                    return

    def pop_due(self, now: float, store_now: float) -> list[Batch]:
        """Remove and return the batches that are to be planned now."""
        due = [batch for batch in (*self._full, *self._open.values()) if self._is_due(batch, now, store_now)]
        for batch in due:
            if batch in self._full:
                self._full.remove(batch)
            else:
                del self._open[batch.group, batch.purpose]
            burst = self._bursts.get(batch.group)
            is_single = len(batch.requests) == 1 and batch.purpose is BatchPurpose.ARRIVALS
            if burst is not None and is_single:
                burst.single_since = now
        return due

    def wake_at(self, now: float, store_now: float) -> float:
        """Return the next time at which a batch may be due without another event; infinite if none waits."""
        return min(
            (self._wake_at(batch, now, store_now) for batch in (*self._full, *self._open.values())), default=math.inf
        )

    @property
    def awaits_scaleup(self) -> bool:
        """True if a batch waits for announced replicas."""
        return any(purpose is BatchPurpose.SCALEUP for _, purpose in self._open)

    def _purpose_of(self, request: PlanContext, store_now: float) -> BatchPurpose:
        if request.is_replan:
            return BatchPurpose.REPLANS
        is_expected = self._scaleup_wait_s > 0 and self._is_expected(request, store_now)
        return BatchPurpose.SCALEUP if is_expected else BatchPurpose.ARRIVALS

    def _is_expected(self, request: PlanContext, store_now: float) -> bool:
        """Return True if the request is expected by a scale-up, or repeats one that is waiting."""
        waiting = self._open.get((request.group, BatchPurpose.SCALEUP))
        if waiting is not None and request.instance_id in waiting.requests:
            return True
        return request.is_scaleup_arrival and self._state.scaleups.is_expected(request.target, store_now)

    def _new_batch(self, request: PlanContext, purpose: BatchPurpose, now: float) -> Batch:
        group = request.group
        if purpose is BatchPurpose.SCALEUP:
            due_at = now + self._scaleup_wait_s
            return Batch(group, purpose, now, due_at, due_at)
        if purpose is BatchPurpose.REPLANS:
            wait_s = self._replan_window_s(request)
            solo_window_s = wait_s if request.has_all_sources else min(SOLO_WINDOW_S, wait_s)
            return Batch(group, purpose, now, now + wait_s, now + solo_window_s)
        burst = self._bursts.get(group)
        first = burst is None or now > burst.expires_at
        if burst is None or first:
            self._bursts = {name: each for name, each in self._bursts.items() if now <= each.expires_at}
            burst = self._bursts[group] = _Burst(now, now)
        elif burst.single_since is not None:
            first = now - burst.single_since > self._min_wait_s
            burst.began_at, burst.single_since = now, None
        wait_s = window_s(now - burst.began_at, self._min_wait_s)
        burst.expires_at = now + wait_s + MAX_WINDOW_S
        # Requests that would read storage together gain more by sharing the read than they lose by waiting.
        solo_window_s = min(SOLO_WINDOW_S, wait_s) if first and not request.target.report.storage else wait_s
        return Batch(group, purpose, now, now + wait_s, now + solo_window_s)

    def _replan_window_s(self, request: PlanContext) -> float:
        return replan_window_s(self._min_wait_s, reads_on=request.has_all_sources)

    def _is_due(self, batch: Batch, now: float, store_now: float) -> bool:
        if now >= (batch.due_at if len(batch.requests) > 1 else batch.solo_due_at):
            return True
        if not batch.is_scaleup:
            return False
        return batch in self._full or not self._state.scaleups.expected(batch.group, store_now)

    def _wake_at(self, batch: Batch, now: float, store_now: float) -> float:
        if batch.is_scaleup:  # the expiry of a scale-up causes no event
            return min(batch.due_at, now + self._state.scaleups.ttl_seconds(batch.group.model, store_now))
        return batch.due_at if len(batch.requests) > 1 else batch.solo_due_at
