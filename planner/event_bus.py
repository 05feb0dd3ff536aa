"""Publishes fork events to subscribers without ever waiting for one.

Each subscriber has a queue with at most one entry per fork, its latest state: a slow reader receives fewer
events, but the same final one. Use from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from planner.core.problems import ProblemError
from planner.core.records import ForkRecord
from planner.core.state import PlannerState
from rfork.asyncio_timeout import timeout
from rfork.schema import ForkEvent

MAX_SUBSCRIBERS: Final = 32
"""Each subscriber costs event-loop time for every fork event, and heartbeats have priority."""
MAX_QUEUED: Final = 16_384
"""Maximum number of queued forks per subscriber."""

ForkEventType = Literal["planned", "progress", "ended"]


@dataclass(frozen=True)
class ForkEventRecord:
    """An event of a fork, and the fork's state after it."""

    number: int
    """Sequence number within one subscription; merged and dropped events leave gaps."""
    event_type: ForkEventType
    fork: ForkRecord

    def event(self, now: float) -> ForkEvent:
        """Return the event as sent to the subscriber."""
        return ForkEvent(kind=self.event_type, fork=self.fork.view(now))


class Subscription:
    """Queued events for one subscriber, oldest first."""

    def __init__(self, matches: Callable[[ForkRecord], bool], max_queued: int = MAX_QUEUED) -> None:
        """`matches` selects the forks; at most `max_queued` of them are queued."""
        self._matches = matches
        self._max_queued = max_queued
        self._number = 0
        self._progress: dict[str, ForkEventRecord] = {}
        self._transitions: dict[str, ForkEventRecord] = {}  # planned or ended forks: not dropped in favour of progress
        self._woken = asyncio.Event()
        self.closed = False

    def put(self, fork: ForkRecord) -> None:
        """Queue the fork's state, replacing its queued state if there is one."""
        if self.closed or not self._matches(fork):
            return
        fork_id, event_type = fork.fork_id, event_type_of(fork)
        waiting = self._transitions.get(fork_id)
        if event_type == "progress" and waiting is not None:
            event_type = waiting.event_type
        table = self._progress if event_type == "progress" else self._transitions
        before = table.get(fork_id)
        if before is None:
            self._progress.pop(fork_id, None)
            self._number += 1
            if len(self._progress) + len(self._transitions) >= self._max_queued:
                oldest = self._progress or self._transitions
                del oldest[next(iter(oldest))]
        table[fork_id] = ForkEventRecord(before.number if before else self._number, event_type, fork)
        self._woken.set()

    def close(self) -> None:
        """Stop delivering events."""
        self.closed = True
        self._woken.set()

    async def next_events(self, max_events: int, within_s: float) -> list[ForkEventRecord]:
        """Return the next events, at most `max_events`; empty if closed, or if none arrived within `within_s`
        seconds.
        """
        if not self._progress and not self._transitions and not self.closed:
            self._woken.clear()
            try:
                async with timeout(within_s):
                    await self._woken.wait()
            except TimeoutError:
                return []
        if self.closed:
            return []
        events: list[ForkEventRecord] = []
        while len(events) < max_events and (self._progress or self._transitions):
            events.append(self._first())
        return events

    def _first(self) -> ForkEventRecord:
        heads = [(next(iter(table.values())), table) for table in (self._transitions, self._progress) if table]
        change, table = min(heads, key=lambda head: head[0].number)
        del table[change.fork.fork_id]
        return change


class EventBus:
    """All subscriptions. Costs nothing while there are none."""

    def __init__(self, state: PlannerState, max_subscribers: int = MAX_SUBSCRIBERS) -> None:
        """At most `max_subscribers` callers may subscribe at a time."""
        self._state = state
        self._max_subscribers = max_subscribers
        self._subscriptions: dict[Subscription, None] = {}
        self._unsubscribe_state: Callable[[], None] | None = None
        self._closed = False

    def subscribe(self, *, model: str | None = None, fork_id: str | None = None) -> Subscription:
        """Subscribe to the running forks, and to every change until `unsubscribe` or `close`.

        Raises ProblemError `too-many-streams` (503) if the maximum number of subscribers is reached.
        """
        if self._closed:
            raise ProblemError(503, "not-ready", "the planner is shutting down", headers={"Retry-After": "2"})
        if len(self._subscriptions) >= self._max_subscribers:
            reason = f"the maximum of {self._max_subscribers} event streams is reached"
            raise ProblemError(503, "too-many-streams", reason, headers={"Retry-After": "10"})
        subscription = Subscription(lambda fork: model in (None, fork.model) and fork_id in (None, fork.fork_id))
        for fork in self._state.live_forks():
            subscription.put(fork)
        self._subscriptions[subscription] = None
        if self._unsubscribe_state is None:
            self._unsubscribe_state = self._state.subscribe(self._publish)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove the subscription of a caller that disconnected."""
        subscription.close()
        self._subscriptions.pop(subscription, None)
        if not self._subscriptions and self._unsubscribe_state is not None:
            self._unsubscribe_state()
            self._unsubscribe_state = None

    def close(self) -> None:
        """End every stream; otherwise the planner's shutdown would wait for them."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()

    def _publish(self, fork: ForkRecord) -> None:
        for subscription in self._subscriptions:
            subscription.put(fork)


def event_type_of(fork: ForkRecord) -> ForkEventType:
    """Return the type of the fork's latest event."""
    if not fork.live:
        return "ended"
    return "progress" if fork.seen_at > fork.planned_at else "planned"
