"""`/ui/feed`: the page's messages as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Request

from planner.auth import still_authorized
from planner.sse import KEEP_ALIVE_S, SseResponse
from planner.ui.broadcaster import Broadcaster
from planner.ui.subscriber import Subscriber


class FeedResponse(SseResponse):
    """Response that streams the messages for one page."""

    def __init__(
        self,
        broadcaster: Broadcaster,
        subscriber: Subscriber,
        still_authorized: Callable[[], bool],
        keep_alive_s: float,
    ) -> None:
        super().__init__(still_authorized, keep_alive_s)
        self._broadcaster = broadcaster
        self._subscriber = subscriber

    @property
    def closed(self) -> bool:
        """True when the page must reconnect."""
        return self._subscriber.closed

    async def next_bytes(self, within_s: float) -> bytes:
        """Return the messages since the last call."""
        return await self._subscriber.next_messages(within_s)

    def unsubscribe(self) -> None:
        """Remove the page from the broadcaster."""
        self._broadcaster.unsubscribe(self._subscriber)


def feed_router(broadcaster: Broadcaster, *, keep_alive_s: float = KEEP_ALIVE_S) -> APIRouter:
    """Return the route of the page's feed. Not in the OpenAPI document: its format is internal to planner and
    page.
    """
    router = APIRouter()

    @router.get("/ui/feed", include_in_schema=False, response_class=FeedResponse)
    async def follow(request: Request) -> FeedResponse:
        """Stream everything the page shows, and its changes."""
        return FeedResponse(
            broadcaster, await broadcaster.subscribe(), partial(still_authorized, request.scope), keep_alive_s
        )

    return router
