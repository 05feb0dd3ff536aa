"""`/ui/feed`: the page's feed as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from planner.auth import still_authorized
from planner.ui.broadcaster import Broadcaster
from planner.ui.subscriber import Subscriber
from rfork.logs import logger

KEEP_ALIVE_S: Final = 5.0
"""Idle seconds after which a comment is sent, so that the page sees that the planner is alive."""
SEND_TIMEOUT_S: Final = 30.0
"""Seconds after which a page that reads nothing is disconnected."""


class SseResponse(StreamingResponse):
    """Response that streams a subscriber's messages.

    Ends when the feed closes, or when the page disconnects, stalls or is no longer authorized.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        broadcaster: Broadcaster,
        subscriber: Subscriber,
        still_authorized: Callable[[], bool],
        keep_alive_s: float,
    ) -> None:
        super().__init__((), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._broadcaster = broadcaster
        self._subscriber = subscriber
        self._still_authorized = still_authorized
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one page."""
        try:
            await super().__call__(scope, receive, send)
        except TimeoutError:
            logger("planner.ui").warning("page disconnected: it does not read its events", stalled_s=SEND_TIMEOUT_S)
        finally:
            self._broadcaster.unsubscribe(self._subscriber)

    async def stream_response(self, send: Send) -> None:
        """Send headers, events and end."""

        async def write(body: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while not self._subscriber.closed:
            body = await self._subscriber.next_messages(self._keep_alive_s)
            if not self._still_authorized():
                break
            if not self._subscriber.closed:
                await write(body or b": still here\n\n")
                # Yield to other tasks between two parts of a large initial state.
                await asyncio.sleep(0)
        await write(b"", more=False)


def sse_router(broadcaster: Broadcaster, *, keep_alive_s: float = KEEP_ALIVE_S) -> APIRouter:
    """Return the route of the page's feed. Not in the OpenAPI document: its format is internal to planner and
    page.
    """
    router = APIRouter()

    @router.get("/ui/feed", include_in_schema=False, response_class=SseResponse)
    async def follow(request: Request) -> SseResponse:
        """Stream everything the page shows, and its changes."""
        return SseResponse(
            broadcaster, await broadcaster.subscribe(), partial(still_authorized, request.scope), keep_alive_s
        )

    return router
