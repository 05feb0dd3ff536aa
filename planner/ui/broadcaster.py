"""Broadcasts the state of the fleet and its changes to pages, as server-sent events.

A stream starts with `begin` (about the planner), continues with `change` events that contain the complete
state, and `ready`; after that, a `change` contains the differences since the last one, about twice a second.
A row is sent completely the first time, later only its changed fields, with None for removed fields.

Without subscribers nothing runs. With subscribers, a single task polls the planner's records; `fleet_diff`
computes the changes. The format is internal to it and the page, and may change with each release. Use from
the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from typing import Final

from planner.core.problems import ProblemError
from planner.plan_service import PlanService
from planner.ui.fleet_diff import FleetDiff
from planner.ui.subscriber import Subscriber
from rfork.logs import logger

MAX_SUBSCRIBERS: Final = 16
"""Maximum number of pages connected at a time."""
FLUSH_INTERVAL_S: Final = 0.5


class Broadcaster:
    """All connected pages, and the task that polls for changes."""

    def __init__(self, service: PlanService, *, heartbeat_s: float, flush_interval_s: float = FLUSH_INTERVAL_S) -> None:
        """`heartbeat_s`: heartbeat interval of instances; `flush_interval_s`: interval between polls of the
        records.
        """
        self._state = service.state
        self._fleet_diff = FleetDiff(service, heartbeat_s=heartbeat_s)
        self._flush_interval_s = flush_interval_s
        self._subscribers: dict[Subscriber, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._reloads = 0
        self._closed = False

    async def subscribe(self) -> Subscriber:
        """Connect a page until `unsubscribe` or `close`.

        ProblemError `too-many-streams` (503) if too many pages are connected, `not-ready` (503) if the feed
        failed.
        """
        if self._closed:
            raise ProblemError(503, "not-ready", "the planner is shutting down", headers={"Retry-After": "2"})
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            detail = f"{MAX_SUBSCRIBERS} pages are already open: close one of them"
            raise ProblemError(503, "too-many-streams", detail, headers={"Retry-After": "10"})
        subscriber = Subscriber()
        self._subscribers[subscriber] = None
        if self._task is None or self._task.done():
            self._reset()
            self._task = asyncio.create_task(self._run(), name="rfork-page-feed")
        try:
            await self._ready.wait()
            if subscriber.closed:
                detail = "the planner is shutting down, or its feed failed; see its log"
                raise ProblemError(503, "not-ready", detail, headers={"Retry-After": "2"})
        except BaseException:
            self.unsubscribe(subscriber)
            raise
        subscriber.reset(self._fleet_diff.full_state())
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Disconnect a page. After the last one, all state is dropped."""
        subscriber.close()
        self._subscribers.pop(subscriber, None)
        if not self._subscribers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._reset()

    def close(self) -> None:
        """End every stream; otherwise the planner's shutdown would wait for them."""
        self._closed = True
        self._ready.set()
        for subscriber in self._subscribers:
            subscriber.close()

    # -- the task ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        unsubscribe_state = self._state.subscribe(self._fleet_diff.mark_changed)
        try:
            await self._publish()
            while True:
                await asyncio.sleep(self._flush_interval_s)
                if self._reloads != self._state.reloads:
                    # The reload may have dropped what was sent: send everything again.
                    await self._publish()
                    for subscriber in self._subscribers:
                        subscriber.reset(self._fleet_diff.full_state())
                message = self._fleet_diff.next_changes()
                for subscriber in self._subscribers:
                    if subscriber.needs_restart:
                        subscriber.reset(self._fleet_diff.full_state())
                    elif message:
                        subscriber.put(message)
        except Exception:  # outermost level of the task: pages reconnect, and it starts again
            logger("planner.ui").exception("live updates of the web page failed, open pages will reconnect")
            for subscriber in self._subscribers:
                subscriber.close()
            self._ready.set()  # pages that wait for the start are closed too
        finally:
            unsubscribe_state()

    async def _publish(self) -> None:
        """Collect the complete state, yielding to other tasks in between."""
        self._reset()
        for _ in range(self._fleet_diff.start()):
            self._fleet_diff.next_changes()
            await asyncio.sleep(0)
        self._ready.set()

    def _reset(self) -> None:
        self._fleet_diff.clear()
        self._reloads = self._state.reloads
        self._ready.clear()
