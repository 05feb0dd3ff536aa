"""Tells callers of the changes of forks as they happen, without ever waiting for a caller.

Each caller has a queue in which a fork stands once, with its latest state: one that reads slowly is told
less often, and of the same end. Used from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from planner.problems import ProblemError
from planner.state import State
from planner.store.records import ForkRecord
from rfork.wire import ForkEvent

MOST_SUBSCRIBERS: Final = 32
"""Each costs the event loop something for every change of a fork, and heartbeats come first."""
MOST_WAITING: Final = 16_384
"""Forks that wait to be told to one caller."""

Kind = Literal["planned", "progress", "ended"]


@dataclass(frozen=True)
class ForkChange:
    """What happened to a fork, and its state after that."""

    number: int
    """Counts the changes of one subscription; those that were merged, or dropped, leave gaps."""
    kind: Kind
    fork: ForkRecord

    def event(self, now: float) -> ForkEvent:
        """The change as it is told."""
        return ForkEvent(kind=self.kind, fork=self.fork.view(now))


class Subscription:
    """The changes that one caller is yet to be told, the oldest first."""

    def __init__(self, wanted: Callable[[ForkRecord], bool], most: int = MOST_WAITING) -> None:
        """`wanted`: which forks it is about; at most `most` of them wait."""
        self._wanted = wanted
        self._most = most
        self._number = 0
        self._progress: dict[str, ForkChange] = {}
        self._turns: dict[str, ForkChange] = {}  # forks planned or ended: these are not given up for progress
        self._woken = asyncio.Event()
        self.closed = False

    def put(self, fork: ForkRecord) -> None:
        """Have it told of the fork's state, in the place of what has not been told of it yet."""
        if self.closed or not self._wanted(fork):
            return
        fork_id, kind = fork.fork_id, kind_of(fork)
        waiting = self._turns.get(fork_id)
        if kind == "progress" and waiting is not None:
            kind = waiting.kind
        table = self._progress if kind == "progress" else self._turns
        before = table.get(fork_id)
        if before is None:
            self._progress.pop(fork_id, None)
            self._number += 1
            if len(self._progress) + len(self._turns) >= self._most:
                oldest = self._progress or self._turns
                del oldest[next(iter(oldest))]
        table[fork_id] = ForkChange(before.number if before else self._number, kind, fork)
        self._woken.set()

    def close(self) -> None:
        """Tell no more."""
        self.closed = True
        self._woken.set()

    async def take(self, most: int, within_s: float) -> list[ForkChange]:
        """The next changes, at most `most`; none where it is closed, or none came for `within_s` seconds."""
        if not self._progress and not self._turns and not self.closed:
            self._woken.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._woken.wait()
            except TimeoutError:
                return []
        if self.closed:
            return []
        taken: list[ForkChange] = []
        while len(taken) < most and (self._progress or self._turns):
            taken.append(self._first())
        return taken

    def _first(self) -> ForkChange:
        heads = [(next(iter(table.values())), table) for table in (self._turns, self._progress) if table]
        change, table = min(heads, key=lambda head: head[0].number)
        del table[change.fork.fork_id]
        return change


class Events:
    """All subscriptions. Costs nothing while there is none."""

    def __init__(self, state: State, most: int = MOST_SUBSCRIBERS) -> None:
        """At most `most` callers are told at a time."""
        self._state = state
        self._most = most
        self._subscriptions: dict[Subscription, None] = {}
        self._silence: Callable[[], None] | None = None
        self._closed = False

    def subscribe(self, *, model: str | None = None, fork_id: str | None = None) -> Subscription:
        """Begin with each fork under way, and go on with every change, until `leave` or `close`.

        ProblemError `too-many-streams` (503) where as many callers as may be are told already.
        """
        if self._closed:
            raise ProblemError(503, "not-ready", "the planner stops", headers={"Retry-After": "2"})
        if len(self._subscriptions) >= self._most:
            why = f"{self._most} callers read events already"
            raise ProblemError(503, "too-many-streams", why, headers={"Retry-After": "10"})
        subscription = Subscription(
            lambda fork: model in (None, fork.model) and fork_id in (None, fork.fork_id)
        )
        for fork in self._state.live_forks():
            subscription.put(fork)
        self._subscriptions[subscription] = None
        if self._silence is None:
            self._silence = self._state.subscribe(self._tell)
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """The caller has gone."""
        subscription.close()
        self._subscriptions.pop(subscription, None)
        if not self._subscriptions and self._silence is not None:
            self._silence()
            self._silence = None

    def close(self) -> None:
        """End every stream: the planner stops, and would wait for them."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()

    def _tell(self, fork: ForkRecord) -> None:
        for subscription in self._subscriptions:
            subscription.put(fork)


def kind_of(fork: ForkRecord) -> Kind:
    """What the record is the latest news of: its plan, what its target said since, or its end."""
    if not fork.live:
        return "ended"
    return "progress" if fork.seen_at > fork.planned_at else "planned"
