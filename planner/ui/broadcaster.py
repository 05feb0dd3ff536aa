"""Tells the page what the fleet is and what of it changes, as server-sent events.

A stream begins with `begin` (about the planner), goes on with `change` events that make up all that there
is, and `ready`; from then on a `change` tells what became otherwise since the last one, about twice a second.
A row is told whole the first time and by its changed fields after that, None for a field that is no more.

While nobody reads, none of this runs. While somebody does, one task looks at the planner's records, whoever
reads: `telling` says what it finds. The format is between that and the page beside it: it may change with
each release. Used from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from planner.http_errors import ProblemError
from planner.registry import Registry
from planner.store.records import InstanceRecord
from planner.ui.fleet_diff import FleetDiff
from planner.ui.subscriber import Subscriber
from rfork.logs import logger

MAX_SUBSCRIBERS: Final = 16
"""Pages that are told at a time."""
FLUSH_INTERVAL_S: Final = 0.5


class Broadcaster:
    """All pages that look, and the task that looks for them."""

    def __init__(self, registry: Registry, *, heartbeat_s: float, flush_interval_s: float = FLUSH_INTERVAL_S) -> None:
        """`heartbeat_s`: in which instances report; `flush_interval_s`: from one look at the records to the next."""
        self._state = registry.state
        self._fleet_diff = FleetDiff(registry, heartbeat_s=heartbeat_s)
        self._flush_interval_s = flush_interval_s
        self._subscribers: dict[Subscriber, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._has_subscribers = asyncio.Event()
        self._stale = False
        self._closed = False
        registry.state.add_state_listener(self)

    async def subscribe(self) -> Subscriber:
        """A page that looks from now on, until `unsubscribe` or `close`.

        ProblemError `too-many-streams` (503) where as many look as may, `not-ready` (503) where it fails.
        """
        if self._closed:
            raise ProblemError(503, "not-ready", "the planner stops", headers={"Retry-After": "2"})
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            detail = f"{MAX_SUBSCRIBERS} pages are open already: close one of them"
            raise ProblemError(503, "too-many-streams", detail, headers={"Retry-After": "10"})
        subscriber = Subscriber()
        self._subscribers[subscriber] = None
        if self._task is None or self._task.done():
            self._on_fork()
            self._task = asyncio.create_task(self._run(), name="rfork-page-feed")
        try:
            await self._has_subscribers.wait()
            if subscriber.closed:
                detail = "the planner stops, or cannot show its fleet: its log says why"
                raise ProblemError(503, "not-ready", detail, headers={"Retry-After": "2"})
        except BaseException:
            self.unsubscribe(subscriber)
            raise
        subscriber.reset(self._fleet_diff.full_state())
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """The page is gone. With the last one all is forgotten."""
        subscriber.close()
        self._subscribers.pop(subscriber, None)
        if not self._subscribers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._on_fork()

    def close(self) -> None:
        """End every stream: the planner stops, and would wait for them."""
        self._closed = True
        self._has_subscribers.set()
        for subscriber in self._subscribers:
            subscriber.close()

    # -- as planner.state.StateListener ----------------------------------------------------------------------

    def on_instance(self, record: InstanceRecord) -> None:
        """Found at the next look."""

    def on_scaleups(self, models: Iterable[str]) -> None:
        """Found at the next look."""

    def on_reload(self) -> None:
        """The store was read anew: what was told may never have been."""
        self._stale = True

    # -- the task ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        unsubscribe_state = self._state.subscribe(self._fleet_diff.mark_changed)
        try:
            await self._publish()
            while True:
                await asyncio.sleep(self._flush_interval_s)
                if self._stale:
                    await self._publish()
                    for subscriber in self._subscribers:
                        subscriber.reset(self._fleet_diff.full_state())
                message = self._fleet_diff.next_changes()
                for subscriber in self._subscribers:
                    if subscriber.needs_restart:
                        subscriber.reset(self._fleet_diff.full_state())
                    elif message:
                        subscriber.put(message)
        except Exception:  # the task's outermost edge: pages come again, and it begins anew
            logger("planner.ui").exception("the page's feed failed")
            for subscriber in self._subscribers:
                subscriber.close()
            self._has_subscribers.set()  # whoever waits to begin is closed, too
        finally:
            unsubscribe_state()

    async def _publish(self) -> None:
        """Take in all that there is, with room for other work in between."""
        self._on_fork()
        for _ in range(self._fleet_diff.start()):
            self._fleet_diff.next_changes()
            await asyncio.sleep(0)
        self._has_subscribers.set()

    def _on_fork(self) -> None:
        self._fleet_diff.clear()
        self._stale = False
        self._has_subscribers.clear()
