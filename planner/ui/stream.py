"""`/ui/feed`: the feed as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from planner.auth import may_go_on
from planner.ui.feed import Feed
from planner.ui.reader import Reader
from rfork.logs import logger

KEEP_ALIVE_S: Final = 5.0
"""After so long without a change a comment is sent: the page sees that the planner lives."""
STALLED_S: Final = 30.0
"""A page that takes nothing for so long is left."""


class FeedStream(StreamingResponse):
    """Sends what a reader has to be told.

    Ends when the feed closes, when the page leaves, stalls or may not go on.
    """

    media_type = "text/event-stream"

    def __init__(
        self, feed: Feed, reader: Reader, may_go_on: Callable[[], bool], keep_alive_s: float
    ) -> None:
        super().__init__((), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._feed = feed
        self._reader = reader
        self._may_go_on = may_go_on
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one page."""
        try:
            await super().__call__(scope, receive, send)
        except TimeoutError:
            logger("planner.ui").warning("a page takes no events", stalled_s=STALLED_S)
        finally:
            self._feed.leave(self._reader)

    async def stream_response(self, send: Send) -> None:
        """Send head, events and end."""

        async def write(body: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(STALLED_S):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while not self._reader.closed:
            body = await self._reader.take(self._keep_alive_s)
            if not self._may_go_on():
                break
            if not self._reader.closed:
                await write(body or b": still here\n\n")
                # Others are served between two pieces of a large beginning.
                await asyncio.sleep(0)
        await write(b"", more=False)


def feed_router(feed: Feed, *, keep_alive_s: float = KEEP_ALIVE_S) -> APIRouter:
    """The route of the page's feed. Not in the API's document: what it says is between planner and page."""
    router = APIRouter()

    @router.get("/ui/feed", include_in_schema=False, response_class=FeedStream)
    async def follow(request: Request) -> FeedStream:
        """All that the page shows, and what changes of it."""
        return FeedStream(feed, await feed.join(), partial(may_go_on, request.scope), keep_alive_s)

    return router
