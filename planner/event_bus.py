"""Tells callers of the changes of forks as they happen, without ever waiting for a caller.

Each caller has a queue in which a fork stands once, with its latest state: one that reads slowly is told
less often, and of the same end. Used from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from planner.http_errors import ProblemError
from planner.state import PlannerState
from planner.store.records import ForkRecord
from rfork.schema import ForkEvent

MAX_SUBSCRIBERS: Final = 32
"""Each costs the event loop something for every change of a fork, and heartbeats come first."""
MAX_QUEUED: Final = 16_384
"""Forks that wait to be told to one caller."""

ForkEventType = Literal["planned", "progress", "ended"]


@dataclass(frozen=True)
class ForkEventRecord:
    """What happened to a fork, and its state after that."""

    number: int
    """Counts the changes of one subscription; those that were merged, or dropped, leave gaps."""
    event_type: ForkEventType
    fork: ForkRecord

    def event(self, now: float) -> ForkEvent:
        """The change as it is told."""
        return ForkEvent(kind=self.event_type, fork=self.fork.view(now))


class Subscription:
    """The changes that one caller is yet to be told, the oldest first."""

    def __init__(self, matches: Callable[[ForkRecord], bool], max_queued: int = MAX_QUEUED) -> None:
        """`matches`: which forks it is about; at most `max_queued` of them wait."""
        self._matches = matches
        self._max_queued = max_queued
        self._number = 0
        self._progress: dict[str, ForkEventRecord] = {}
        self._transitions: dict[
            str, ForkEventRecord
        ] = {}  # forks planned or ended: these are not given up for progress
        self._woken = asyncio.Event()
        self.closed = False

    def put(self, fork: ForkRecord) -> None:
        """Have it told of the fork's state, in the place of what has not been told of it yet."""
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
        """Tell no more."""
        self.closed = True
        self._woken.set()

    async def next_events(self, max_events: int, within_s: float) -> list[ForkEventRecord]:
        """The next changes, at most `max_queued`; none where it is closed, or none came for `within_s` seconds."""
        if not self._progress and not self._transitions and not self.closed:
            self._woken.clear()
            try:
                async with asyncio.timeout(within_s):
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
    """All subscriptions. Costs nothing while there is none."""

    def __init__(self, state: PlannerState, max_subscribers: int = MAX_SUBSCRIBERS) -> None:
        """At most `max_queued` callers are told at a time."""
        self._state = state
        self._max_subscribers = max_subscribers
        self._subscriptions: dict[Subscription, None] = {}
        self._unsubscribe_state: Callable[[], None] | None = None
        self._closed = False

    def subscribe(self, *, model: str | None = None, fork_id: str | None = None) -> Subscription:
        """Begin with each fork under way, and go on with every change, until `unsubscribe` or `close`.

        ProblemError `too-many-streams` (503) where as many callers as may be are told already.
        """
        if self._closed:
            raise ProblemError(503, "not-ready", "the planner stops", headers={"Retry-After": "2"})
        if len(self._subscriptions) >= self._max_subscribers:
            reason = f"{self._max_subscribers} callers read events already"
            raise ProblemError(503, "too-many-streams", reason, headers={"Retry-After": "10"})
        subscription = Subscription(lambda fork: model in (None, fork.model) and fork_id in (None, fork.fork_id))
        for fork in self._state.live_forks():
            subscription.put(fork)
        self._subscriptions[subscription] = None
        if self._unsubscribe_state is None:
            self._unsubscribe_state = self._state.subscribe(self._publish)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """The caller has gone."""
        subscription.close()
        self._subscriptions.pop(subscription, None)
        if not self._subscriptions and self._unsubscribe_state is not None:
            self._unsubscribe_state()
            self._unsubscribe_state = None

    def close(self) -> None:
        """End every stream: the planner stops, and would wait for them."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()

    def _publish(self, fork: ForkRecord) -> None:
        for subscription in self._subscriptions:
            subscription.put(fork)


def event_type_of(fork: ForkRecord) -> ForkEventType:
    """What the record is the latest news of: its plan, what its target said since, or its end."""
    if not fork.live:
        return "ended"
    return "progress" if fork.seen_at > fork.planned_at else "planned"
